"""Programs from public bug reports about data-parallel training, run with what paceline offers.

Each starts its own ranks and prints `RESULT ok` or `RESULT wrong` with what it saw. They are not part of
paceline: looked for in the folder that PACELINE_CASES names, else beside the checkout; where they are not,
nothing is run.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.suites.outside import DDP, folder, listed, run

# How a program is told what to test.
UNDER_TEST = {
    "DDP_CLASS": DDP,
    "SYNCBN_CONVERT": "paceline:SyncBatchNorm.convert_sync_batchnorm",
    "LAUNCHER": f"{sys.executable} -m paceline launch",
    "SAVE_FN": "paceline.checkpoint:save",
    "SAMPLER": "paceline:DistributedSampler",
    "TRAINER": "paceline:Trainer",
    "TRAINING_ARGS": "paceline:TrainingArguments",
    "TRAINER_CALLBACK": "paceline:TrainerCallback",
}


def programs() -> list[Path]:
    """All of them, by number."""
    return sorted(folder("PACELINE_CASES", "cases").glob("[0-9][0-9]_*.py"))


@pytest.mark.suites
@pytest.mark.parametrize("program", programs(), ids=lambda path: path.stem)
def test_program_comes_out_right(program: Path, tmp_path: Path) -> None:
    printed = run([str(program)], program.parent, limit=90, TMPDIR=str(tmp_path), **UNDER_TEST)
    verdicts = re.findall(r"^RESULT .*", printed, re.MULTILINE)
    assert verdicts, printed[-2000:]
    expected = listed("expected_wrong_programs.txt").get(program.name[:2])
    if expected is None:
        assert verdicts[-1].startswith("RESULT ok"), verdicts[-1]
    elif verdicts[-1].startswith("RESULT ok"):
        pytest.fail(f"right by now, take it off the list ({expected})")
    else:
        pytest.xfail(expected)
