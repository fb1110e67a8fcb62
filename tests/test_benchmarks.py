"""The benchmarks run: each as short as it can be. What they print is for readers, and not looked at here.

Left out are those of memory, imports, heads and the Trainer, which take half a minute and more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
SHORTEST = {
    "allreduce": ["--ranks", "2", "--rounds", "1", "--sizes", "4096"],
    "call": [],
    "kills": ["--kills", "1"],
    "launch": ["--ranks", "1", "--rounds", "1"],
    "recorder": ["--rounds", "1"],
    "step": ["--rounds", "2", "--no-memory", "--model", "deep narrow mlp"],
    "synchronisation": ["--rounds", "1", "--model", "deep narrow mlp"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORTEST)
def test_a_benchmark_runs_to_its_end(name: str, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, str(FOLDER / f"{name}.py"), *SHORTEST[name]],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, complaints = process.communicate(timeout=110)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # all that it started
    assert process.returncode == 0, complaints[-3000:]
    assert printed.strip()
    assert not list(tmp_path.iterdir())
