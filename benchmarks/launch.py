"""How long it takes from the command to the user's code, beside torchrun and Accelerate's launcher.

    python benchmarks/launch.py [--ranks 1 2 4 8] [--rounds 3]

Every launcher starts the same script, which notes when its first line runs and when it has torch.
The time that counts is that of the last rank. Launchers take turns; of all rounds the median is
shown, and its ratio to paceline's, which is what can be compared between machines. The processor
time of everything that was started, from the command to its end, depends least on what else the
machine does.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import time; first = time.time()
import os, torch
ready = time.time()
with open(os.path.join(os.environ["FOLDER"], os.environ.get("RANK", "0")), "w") as file:
    file.write(f"{first} {ready}")
"""
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "paceline": [sys.executable, "-m", "paceline", "launch", "--cpu", "--num_processes={ranks}"],
    "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node={ranks}"],
    "accelerate": [
        *(str(BIN / "accelerate"), "launch", "--num_processes={ranks}", "--num_machines=1"),
        *("--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"),
    ],
}
LIMIT = 300  # seconds for one launch


def measure(launcher: str, ranks: int) -> tuple[float, float, float]:
    """Seconds from the command to the last rank's first line, and to its having torch; processor seconds."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "job.py")
        script.write_text(SCRIPT)
        words = [word.format(ranks=ranks) for word in LAUNCHERS[launcher]]
        # Accelerate's launcher starts one rank on the CPU whatever it is told, unless it is told this.
        words += ["--multi_gpu"] if launcher == "accelerate" and ranks > 1 else []
        environment = {**os.environ, "FOLDER": folder, "OMP_NUM_THREADS": "1", "HF_HOME": folder}
        began, used = time.time(), processor_seconds()
        done = subprocess.run(
            [*words, str(script)], env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        if done.returncode:
            sys.exit(f"{launcher} failed:\n{done.stderr}")
        noted = [Path(folder, str(rank)).read_text().split() for rank in range(ranks)]
    firsts, readies = ([float(time) for time in column] for column in zip(*noted, strict=True))
    return max(firsts) - began, max(readies) - began, processor_seconds() - used


def processor_seconds() -> float:
    """Of all processes that were started from here and have ended, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    columns = f"{'first line':>10} {'has torch':>10} {'ratio':>6} {'processor':>10} {'ratio':>6}"
    print(f"{'ranks':>5} {'launcher':<11} {columns}  (seconds)")
    for ranks in arguments.ranks:
        times: dict[str, list[tuple[float, float, float]]] = {launcher: [] for launcher in LAUNCHERS}
        for _ in range(arguments.rounds):
            for launcher, found in times.items():
                found.append(measure(launcher, ranks))
        medians = {
            launcher: [statistics.median(column) for column in zip(*found, strict=True)]
            for launcher, found in times.items()
        }
        _, our_ready, our_used = medians["paceline"]
        for launcher, (first, ready, used) in medians.items():
            print(
                f"{ranks:>5} {launcher:<11} {first:>10.2f} {ready:>10.2f} {ready / our_ready:>6.2f} "
                f"{used:>10.2f} {used / our_used:>6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
