"""`paceline diagnose`: what the files of a run tell when nothing else is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.diagnose.afterwards import explain, tell
from paceline.errors import ArgumentError
from paceline.recorder.layout import Kind, open_file
from paceline.recorder.reading import RankState
from paceline.recorder.ring import Recorder

SOURCE = Path(__file__).resolve().parents[2] / "src"


def write_records(folder: Path) -> None:
    """Rank 0 waits for more than a second, rank 1 is still before its backward."""
    for rank in range(2):
        memory = open_file(folder, f"rank_{rank}", rank, 2)
        assert memory is not None
        recorder = Recorder(memory, folder / f"rank_{rank}.names")
        recorder.add(Kind.FORWARD, 4)
        if rank == 0:
            recorder.add(Kind.BACKWARD, 4)
            recorder.waiting.__enter__()
            recorder.say("backward pass 4, all-reduce of bucket 1 of 1 (w)")
    time.sleep(1.2)
    recorder.phase("loading data")


def test_the_report_of_the_last_attempt_is_shown_again(tmp_path: Path) -> None:
    for attempt in range(2):
        (tmp_path / f"attempt_{attempt}" / "records").mkdir(parents=True)
        (tmp_path / f"attempt_{attempt}" / "report.txt").write_text(f"report {attempt}\n")
        os.utime(tmp_path / f"attempt_{attempt}" / "report.txt", (4e9 + attempt, 4e9 + attempt))
    assert explain(tmp_path) == "report 1\n"
    assert explain(tmp_path / "attempt_0") == "report 0\n"


@pytest.mark.parametrize("inside", ["", "attempt_0/records"])
def test_without_a_report_the_records_are_compared(tmp_path: Path, inside: str) -> None:
    write_records(tmp_path / inside)
    told = explain(tmp_path).splitlines()
    assert told[0].startswith("rank 1 held up the others: it was loading data.")
    assert "Rank 0 had waited" in told[0] and "all-reduce of bucket 1 of 1 (w)" in told[0]
    assert told[1:] == ["rank 0 was in backward pass 4", "rank 1 was loading data"]


def test_a_rank_that_fell_silent_before_the_others_is_named_first() -> None:
    waits = {"waits_for": "bucket 1 of 1 (w)", "waits_since": 70.0}
    told = tell([RankState(0, seen=100.0, **waits), RankState(1, seen=70.0, phase="backward pass 3")])
    assert told.startswith("rank 1 was heard of for the last time 30 s before the others: it was killed, ")
    assert "It was in backward pass 3. Rank 0 had waited 30 s for bucket 1 of 1 (w)." in told


def test_a_folder_without_records_says_what_to_name_instead(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="PACELINE_RECORDS"):
        explain(tmp_path)


def test_the_command(tmp_path: Path) -> None:
    write_records(tmp_path / "attempt_0" / "records")
    command = [sys.executable, "-m", "paceline", "diagnose"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    settings = {"capture_output": True, "text": True, "timeout": 60, "env": environment, "check": False}
    done = subprocess.run([*command, str(tmp_path)], **settings)
    assert (done.returncode, done.stdout) == (0, explain(tmp_path))
    nothing = subprocess.run([*command, str(tmp_path / "nowhere")], **settings)
    assert nothing.returncode == 2 and nothing.stderr.startswith("paceline diagnose: ")
