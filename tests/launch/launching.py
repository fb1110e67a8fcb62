"""Starts ``paceline launch`` as a user would, bounded in time, and looks after what it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
LIMIT = 60  # seconds that any launch of a test may take


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "paceline", "launch", *map(str, arguments)]


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without a trace of a launcher or a configuration file, and ``extra``."""
    launcher_words = (
        "RANK",
        "WORLD_SIZE",
        "MASTER_",
        "LOCAL_",
        "GROUP_",
        "ROLE_",
        "TORCHELASTIC_",
        "ACCELERATE_",
        "PET_",
        "SLURM_",
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launcher_words)}
    path = os.pathsep.join(filter(None, (str(SOURCE), kept.get("PYTHONPATH"))))
    return {**kept, "PYTHONPATH": path, "HF_HOME": "/nonexistent", **extra}


def run(*arguments: str | Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """One launch from start to end; stdout and stderr are kept apart."""
    with started(*arguments, **extra) as process:
        out, err = process.communicate(timeout=LIMIT)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextmanager
def started(*arguments: str | Path, **extra: str) -> Iterator[subprocess.Popen[str]]:
    """A launch that is under way; killed with all it started, should it still be there at the end."""
    process = subprocess.Popen(
        command(*arguments),
        env=environment(**extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            for pid in [*descendants(process.pid), process.pid]:
                kill(pid)
            process.communicate(timeout=LIMIT)


def script(folder: Path, text: str, name: str = "job.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def wait_for(paths: Iterable[Path], process: subprocess.Popen[str]) -> None:
    """Until all files are there; fails when the launch ends before that."""
    waiting = list(paths)
    deadline = time.monotonic() + LIMIT
    while waiting:
        assert process.poll() is None, f"ended early: {process.communicate()}"
        assert time.monotonic() < deadline, f"never written: {waiting}"
        waiting = [path for path in waiting if not path.exists()]
        time.sleep(0.02)


def pids_in(folder: Path) -> list[int]:
    """The numbers that processes wrote into files named ``pid*``."""
    return [int(path.read_text()) for path in sorted(folder.glob("pid*"))]


def still_alive(pids: Iterable[int], within: float = 5.0) -> list[int]:
    """Which of the processes are there after ``within`` seconds; looks until none is."""
    deadline = time.monotonic() + within
    left = [pid for pid in pids if alive(pid)]
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [pid for pid in left if alive(pid)]
    for pid in left:
        kill(pid)
    return left


def alive(pid: int) -> bool:
    return _stat(pid)[0] not in ("", "Z", "X")


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def descendants(pid: int) -> list[int]:
    parents = {int(name): _stat(int(name))[1] for name in os.listdir("/proc") if name.isdigit()}
    found = [child for child, parent in parents.items() if parent == pid]
    for child in found:
        found.extend(grandchild for grandchild, parent in parents.items() if parent == child)
    return found


def _stat(pid: int) -> tuple[str, int]:
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "", 0
    return state, int(parent)
