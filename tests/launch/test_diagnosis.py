"""The last thing on the screen says which rank it was, what it was doing, and who waited for what."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.launch.launching import command, environment, run, script

JOB = """
import datetime, os, signal, sys, time
import torch, torch.distributed as dist
from paceline import DistributedDataParallel

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
kind, rank = sys.argv[1], dist.get_rank()

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        if kind == "loads slowly" and rank == 1 and index == 4:
            time.sleep(300)
        return torch.ones(3)

model = DistributedDataParallel(torch.nn.Linear(3, 2))
for number, sample in enumerate(torch.utils.data.DataLoader(Samples(), batch_size=1), start=1):
    if rank == 1 and number == 4:
        if kind == "raises":
            raise ValueError("sample 17 is corrupt")
        if kind == "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
    loss = model(sample).sum()
    if kind == "skips" and rank == 1 and number == 4:
        continue
    loss.backward()
"""
BUCKET = r"all-reduce of bucket 1 of 1 \((bias, weight|weight, bias)\)"


def report_of(tmp_path: Path, kind: str, *options: str) -> tuple[list[str], str]:
    """The launcher's own lines and all of its stderr, after a run in which rank 1 goes wrong that way."""
    kept = tmp_path / "tmp"
    kept.mkdir()
    done = run("--num_processes", "2", *options, script(tmp_path, JOB), kind, TMPDIR=str(kept))
    assert done.returncode in (1, 137), done.stderr
    lead = "paceline launch: "
    return [
        line.removeprefix(lead) for line in done.stderr.splitlines() if line.startswith(lead)
    ], done.stderr


def test_a_rank_that_sleeps_in_its_data_loading_past_the_timeout(tmp_path: Path) -> None:
    lines, stderr = report_of(tmp_path, "loads slowly")
    assert lines[1].startswith("rank 1 held up the others (alive, pid ")
    assert lines[2].startswith("rank 0 failed after it (exit code 1): ")
    assert "CollectiveTimeoutError" in lines[2]
    assert stderr.splitlines()[-1].endswith(lines[-1])
    assert re.match(
        r"rank 1 held up the others: it was asleep in data loading for \d.*s at job.py:14 in __getitem__, "
        r"between backward pass 4 and the next forward. "
        rf"Rank 0 had waited \d.*s for backward pass 5, {BUCKET}. Make loading quicker",
        lines[-1],
    )


def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    lines, _ = report_of(tmp_path, "is stopped")
    assert lines[1].startswith("rank 1 failed first (found stopped")
    assert "between backward pass 3 and the next forward, last heard of" in lines[-2]
    assert re.search(rf"Rank 0 had waited \d.*s for backward pass 4, {BUCKET}.", lines[-2])
    assert lines[-1].startswith("rank 1 was stopped (SIGSTOP")


def test_an_exception_stays_the_last_word(tmp_path: Path) -> None:
    lines, stderr = report_of(tmp_path, "raises")
    assert stderr.splitlines()[-1] == "[rank1]: ValueError: sample 17 is corrupt"
    assert lines[-1].startswith("Rank 1 was between backward pass 3 and the next forward.")


def test_a_rank_that_skips_a_backward(tmp_path: Path) -> None:
    lines, stderr = report_of(tmp_path, "skips")
    assert lines[-1].startswith(
        "before backward pass 4 rank 0 ran 1 forward, but rank 1 ran 2: rank 1 skipped a backward"
    )
    assert stderr.splitlines()[-1].endswith(lines[-1])


def test_what_failed_is_kept_and_told_again_and_what_went_well_is_not(tmp_path: Path) -> None:
    lines, stderr = report_of(tmp_path, "is killed")
    (kept,) = (tmp_path / "tmp").glob("paceline-*")
    assert lines[0] == f"what the ranks recorded is in {kept} (paceline diagnose)"
    diagnose = [*command()[:-1], "diagnose", str(kept)]
    again = subprocess.run(
        diagnose, env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    assert stderr.endswith(again.stdout) and "rank 1 was killed by SIGKILL" in again.stdout
    assert len(list(kept.glob("attempt_0/records/rank_*.record"))) == 2
    well = tmp_path / "well"
    well.mkdir()
    done = run("--num_processes", "2", script(tmp_path, JOB), "goes well", TMPDIR=str(well))
    assert (done.returncode, list(well.iterdir())) == (0, []), done.stderr


SLOW = """
import time
import torch, torch.distributed as dist
from paceline import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(3, 2))
end = time.monotonic() + 25
over = torch.zeros(1)
while not over:
    if dist.get_rank() == 1:
        time.sleep(0.3)
    model(torch.ones(1, 3)).sum().backward()
    over += time.monotonic() > end
    dist.all_reduce(over)
"""


@pytest.mark.slow
def test_a_slow_rank_is_told_while_the_run_goes_on(tmp_path: Path) -> None:
    done = run("--num_processes", "2", script(tmp_path, SLOW))
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("paceline launch: ")]
    assert len(told) == 1
    assert re.match(
        r"paceline launch: rank 1 is slower than the others, who waited for it \d+% of the time over "
        r"the last \d+ s \(\d+ steps\). It was \d+% of its time at job.py:12",
        told[0],
    )


def test_nothing_is_recorded_if_so_wished(tmp_path: Path) -> None:
    text = "import os, threading; print(os.environ['PACELINE_RECORDS'], threading.active_count())"
    done = run("--num_processes", "1", script(tmp_path, text), PACELINE_RECORDS="off")
    assert done.stdout == "off 1\n", done.stderr
