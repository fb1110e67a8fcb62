"""PyTorch's and Accelerate's own DDP tests, run against paceline's class.

The two scripts that run them are not part of paceline. They are looked for in the folder that
PACELINE_SUITES names, else beside the checkout; where they are not, these tests skip.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.suites.outside import DDP, folder, listed, run

SUITES = {
    "torch": ["run_torch_suite.py", "--on-cpu", "--start", "fork", "--group", "cpu", "--group", "gated"],
    "accelerate": ["run_accelerate_suite.py", "--start", "fork"],
}


@pytest.mark.suites
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("suite", SUITES)
def test_peers_own_tests_pass(suite: str, tmp_path: Path) -> None:
    script, *options = SUITES[suite]
    path = folder("PACELINE_SUITES", "tools") / script
    if not path.exists():
        pytest.skip(f"no {path}")
    result = tmp_path / "result.json"
    printed = run([str(path), "--ddp", DDP, *options, "--json", str(result)], tmp_path, limit=880)
    assert result.exists(), printed[-3000:]
    tests = json.loads(result.read_text())["tests"]
    failed = {test["name"]: test["reason"] for test in tests if test["outcome"] == "failed"}
    passed = {test["name"] for test in tests if test["outcome"] == "passed"}
    expected = {key.split()[1] for key in listed("expected_failures.txt") if key.split()[0] == suite}

    surprises = [f"{name}: {reason}" for name, reason in failed.items() if name not in expected]
    assert not surprises, f"{len(passed)} passed, these failed:\n" + "\n".join(surprises)
    assert not expected & passed, f"pass by now, take them off the list: {sorted(expected & passed)}"
    assert passed
