"""Kill -9 at random moments of a run that saves every 3 steps: it always comes to the same end.

    python benchmarks/kills.py               40 kills, 2 ranks
    python benchmarks/kills.py --kills 5

A run is started again and again, resuming from what is there, and killed (the launcher and all ranks, with
SIGKILL) at a random time after its first new checkpoint. In the end it is let through, and so is the same
run undisturbed. Printed: how often a kill came while a checkpoint was being written, and whether the final
weights are bit-identical to the undisturbed run's. It fails if they differ, or a checkpoint is lost.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from paceline.checkpoint import contents

STEPS, SAVE_EVERY = 3_000, 3

SCRIPT = """
import sys
from pathlib import Path
import torch
from torch import nn
from paceline import Trainer, TrainingArguments

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.2), nn.Linear(64, 1))
    def forward(self, x, labels):
        return {"loss": (self.layers(x).squeeze(-1) - labels).square().mean()}

folder, steps, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
points = torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
data = [{"x": point, "labels": point.sum()} for point in points]
args = TrainingArguments(
    str(folder), use_cpu=True, disable_tqdm=True, report_to="none", logging_strategy="no", max_steps=steps,
    save_steps=every, save_total_limit=3, per_device_train_batch_size=4, learning_rate=1e-3,
    lr_scheduler_type="constant",  # another length of the run must not change its steps
)
trainer = Trainer(Net(), args, train_dataset=data)
trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
if trainer.is_world_process_zero():
    torch.save(trainer.model.state_dict(), folder.with_suffix(".pt"))
"""


def start(folder: Path, ranks: int, steps: int) -> subprocess.Popen[bytes]:
    """The run, on its own in a session."""
    script = folder.parent / "run.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "paceline",
        "launch",
        "--cpu",
        "--num_processes",
        str(ranks),
        str(script),
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(
        [*command, str(folder), str(steps), str(SAVE_EVERY)], start_new_session=True, **quiet
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the launcher and everything below it."""
    for pid in [process.pid, *descendants(process.pid)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait(60)


def descendants(pid: int) -> list[int]:
    """Living processes below `pid`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        if parent == pid:
            found += [int(entry.name), *descendants(int(entry.name))]
    return found


def newest(folder: Path) -> int:
    """The step of the newest complete checkpoint; 0 if there is none."""
    found = contents.newest_complete(folder).found
    return contents.step_of(found) if found is not None else 0


def wait_beyond(folder: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    """Return when a checkpoint after `step` has appeared."""
    deadline = time.monotonic() + 300
    while not any(contents.step_of(each) > step for each in contents.list_checkpoints(folder)):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no checkpoint after step {step}; exit code {process.returncode}")
        time.sleep(0.002)


def main() -> None:
    """Run, kill, compare; exits 1 if anything is not as it must be."""
    parser = argparse.ArgumentParser(description="Kill a training run at random moments and compare its end.")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder, torn, step = Path(name, "killed"), 0, 0
        for _ in range(options.kills):
            process = start(folder, options.ranks, STEPS)
            try:
                wait_beyond(folder, step, process)
                time.sleep(rng.uniform(0, 0.1))
            finally:
                kill(process)
            torn += any(folder.glob(".aside-*"))
            before, step = step, newest(folder)
            if step < before:
                sys.exit(f"step {before} was complete, and now {step} is the newest that is")
        last = step + 2 * SAVE_EVERY
        for each in (folder, Path(name, "undisturbed")):
            if start(each, options.ranks, last).wait(600) != 0:
                sys.exit(f"the run in {each.name} failed")
        got, want = (torch.load(Path(name, each)) for each in ("killed.pt", "undisturbed.pt"))
    same = all(torch.equal(got[key], want[key]) for key in want)
    print(
        f"{options.kills} kills up to step {step} of {last}, {torn} of them while a checkpoint was being "
        f"written; final weights {'bit-identical' if same else 'DIFFERENT'}"
    )
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
