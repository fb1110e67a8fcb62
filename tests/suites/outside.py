"""Where the judges from outside lie, and how their programs are run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BESIDE = HERE.parents[2] / "shared"  # beside the checkout
DDP = "paceline:DistributedDataParallel"


def folder(variable: str, default: str) -> Path:
    """The folder that an environment variable names, or the one beside the checkout."""
    return Path(os.environ.get(variable) or BESIDE / default)


def listed(name: str) -> dict[str, str]:
    """A checked-in list: `key  reason` a line, where two spaces end the key."""
    lines = [line.strip() for line in (HERE / name).read_text().splitlines()]
    pairs = [line.partition("  ") for line in lines if line and not line.startswith("#")]
    assert all(reason.strip() for _, _, reason in pairs), f"{name}: a line without a reason"
    return {key: reason.strip() for key, _, reason in pairs}


def run(command: list[str], cwd: Path, limit: float, **environment: str) -> str:
    """What a Python program prints, on both streams; killed with all it started after `limit` seconds."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    with subprocess.Popen(
        [sys.executable, "-B", *command],
        cwd=cwd,
        env=variables | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(timeout=limit)[0]
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
