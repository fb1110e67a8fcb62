"""Programs from public bug reports about data-parallel wrappers, run with paceline's class.

Each starts its own ranks and prints `RESULT ok` or `RESULT wrong` with what it saw. They are not part of
paceline: looked for in the folder that PACELINE_CASES names, else beside the checkout; where they are not,
nothing is run.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.suites.outside import DDP, folder, listed, run

LAST_WRAPPER_PROGRAM = 37


def programs() -> list[Path]:
    """Those whose number is of the wrapper's range."""
    found = sorted(folder("PACELINE_CASES", "cases").glob("[0-9][0-9]_*.py"))
    return [path for path in found if int(path.name[:2]) <= LAST_WRAPPER_PROGRAM]


@pytest.mark.suites
@pytest.mark.parametrize("program", programs(), ids=lambda path: path.stem)
def test_program_comes_out_right(program: Path, tmp_path: Path) -> None:
    printed = run([str(program)], program.parent, limit=90, DDP_CLASS=DDP, TMPDIR=str(tmp_path))
    verdicts = re.findall(r"^RESULT .*", printed, re.MULTILINE)
    assert verdicts, printed[-2000:]
    expected = listed("expected_wrong_programs.txt").get(program.name[:2])
    if expected is None:
        assert verdicts[-1].startswith("RESULT ok"), verdicts[-1]
    elif verdicts[-1].startswith("RESULT ok"):
        pytest.fail(f"right by now, take it off the list ({expected})")
    else:
        pytest.xfail(expected)
