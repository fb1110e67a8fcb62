"""How long it takes from the command to the user's code, beside torchrun and Accelerate's launcher.

    python benchmarks/launch.py [--ranks 1 2 4 8] [--rounds 3] [--timeline]

Every launcher starts the same script, which notes when its first line runs and when it has torch.
The time that counts is that of the last rank. Launchers take turns; of all rounds the median is
shown, and its ratio to paceline's, which is what can be compared between machines. The processor
time of everything that was started, from the command to its end, depends least on what else the
machine does. With --timeline, what happens between the command and the first line is shown as well, for one
launch of paceline and one of torchrun at the largest number of ranks: an audit hook in every Python notes
when it was up, when it began to import torch, and when it started another process.
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
# As sitecustomize.py, run by every Python that is started.
NOTES = """
import os, sys, time
def note(what):
    with open(os.path.join(os.environ["FOLDER"], "notes"), "a") as file:
        file.write(f"{time.time()} {os.getpid()} {what}\\n")
def hook(event, arguments, seen=set()):
    if event == "import" and arguments[0] == "torch" and "torch" not in seen:
        seen.add("torch")
        note("begins to import torch")
    elif event == "os.fork":
        note("forks")
    elif event == "subprocess.Popen" and "guardian.py" not in str(arguments[1]):
        programs = [os.path.basename(word) for word in arguments[1] if str(word).endswith(".py")]
        note("starts " + (programs or ["a program"])[0])
note("Python is up")
sys.addaudithook(hook)
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


def measure(launcher: str, ranks: int, *, timeline: bool = False) -> tuple[float, float, float]:
    """Seconds from the command to the last rank's first line, and to its having torch; processor seconds.

    Args:
        launcher: one of ``LAUNCHERS``.
        ranks: how many.
        timeline: print what happened between, which costs some time itself.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "job.py")
        script.write_text(SCRIPT)
        words = [word.format(ranks=ranks) for word in LAUNCHERS[launcher]]
        # Accelerate's launcher starts one rank on the CPU whatever it is told, unless it is told this.
        words += ["--multi_gpu"] if launcher == "accelerate" and ranks > 1 else []
        environment = {**os.environ, "FOLDER": folder, "OMP_NUM_THREADS": "1", "HF_HOME": folder}
        if timeline:
            notes = Path(folder, "hook", "sitecustomize.py")
            notes.parent.mkdir()
            notes.write_text(NOTES)
            paths = [str(notes.parent), os.environ.get("PYTHONPATH")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        began, used = time.time(), processor_seconds()
        done = subprocess.run(
            [*words, str(script)], env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        if done.returncode:
            sys.exit(f"{launcher} failed:\n{done.stderr}")
        noted = [Path(folder, str(rank)).read_text().split() for rank in range(ranks)]
        firsts, readies = ([float(time) for time in column] for column in zip(*noted, strict=True))
        if timeline:
            said = Path(folder, "notes").read_text().splitlines()
            show_timeline(began, said, {"a script's first line runs": firsts, "a script has torch": readies})
    return max(firsts) - began, max(readies) - began, processor_seconds() - used


def show_timeline(began: float, notes: list[str], scripts: dict[str, list[float]]) -> None:
    """Print when each thing happened for the first and for the last time, in each kind of process."""
    times = dict(scripts)
    kinds: dict[str, str] = {}
    for note in notes:
        moment, pid, what = note.split(" ", 2)
        kind = kinds.setdefault(pid, ("launcher", "its child", "a rank")[min(len(kinds), 2)])
        times.setdefault(f"{kind}: {what}", []).append(float(moment))
    for what, moments in sorted(times.items(), key=lambda each: min(each[1])):
        first, last = min(moments) - began, max(moments) - began
        print(f"{first:>10.2f} s{f' to {last:.2f} s' if len(moments) > 1 else '':<12} {what}", flush=True)


def processor_seconds() -> float:
    """Of all processes that were started from here and have ended, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeline", action="store_true", help="show what happens before the first line")
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
    for launcher in ("paceline", "torchrun") if arguments.timeline else ():
        print(f"\n{launcher}, {max(arguments.ranks)} ranks:")
        measure(launcher, max(arguments.ranks), timeline=True)


if __name__ == "__main__":
    main()
