"""A long run of random programs: ``python -m tests.engine.fuzz --programs 10000 --seed 0``.

Each program has its own seed, ``--seed`` plus its number, so that one can be run again alone
(``--programs 1 --seed N``). What goes wrong is made smaller, printed whole, and counted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from random import Random

from tests.engine.programs import draw_program
from tests.engine.rank_pool import InvalidProgramError, RankPools


def main() -> int:
    """Returns the number of programs that went wrong, 100 at most."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--stop-after", type=int, default=20, help="programs that go wrong")
    parser.add_argument("--shrink", type=int, default=150, help="most trials to make a program smaller")
    options = parser.parse_args()
    began, counts, wrong = time.monotonic(), Counter[str](), 0
    with RankPools() as pools:
        for number in range(options.programs):
            seed = options.seed + number
            program = draw_program(Random(seed))
            try:
                verdict = pools.verdict(program)
            except InvalidProgramError as reason:
                counts[f"not for plain PyTorch: {str(reason)[:60]}"] += 1
                continue
            counts[f"{program.world} ranks"] += 1
            if verdict is not None:
                wrong += 1
                print(f"---- seed {seed} went wrong: {verdict.splitlines()[0][:200]}", flush=True)
                small, words = pools.shrink(program, verdict, options.shrink)
                print(f"{small}\n{words}\n", flush=True)
                if wrong >= options.stop_after:
                    break
            if (number + 1) % 500 == 0:
                seconds = time.monotonic() - began
                print(f"{number + 1} programs, {wrong} went wrong, {seconds:.0f} s", flush=True)
    compared = pools.averages_compared
    print(f"{number + 1} programs from seed {options.seed}, {wrong} went wrong", flush=True)
    print(f"{compared} synchronising backwards compared; {dict(counts)}", flush=True)
    return min(wrong, 100)


if __name__ == "__main__":
    sys.exit(main())
