import sys
from random import Random
from tests.engine.programs import *
from tests.engine.rank_pool import *
if __name__=="__main__":
    with RankPools() as p:
        for seed in map(int, sys.argv[1:]):
            pr=draw_program(Random(seed)); v=p.verdict(pr)
            if v is None: print(seed,"fine"); continue
            small, words = p.shrink(pr, v, 80)
            print(f"---- {seed}\n{small}\n{words[:700]}\n...{words[-600:]}\n", flush=True)
