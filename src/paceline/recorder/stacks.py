"""Where a rank's threads stood when native code crashed, or when the launcher asked: a text file.

Python's faulthandler writes it from inside a signal handler, without the interpreter's lock. So it also
tells where a rank is that is stuck in native code which holds the lock, and so looks at nothing any more.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
from pathlib import Path

from paceline.recorder.places import Place, of_written_stack

STACKS_SUFFIX = ".stacks"
_CRASHED = "Fatal Python error"
_CURRENT = "Current thread "
_THREADS = ("Thread 0x", _CURRENT)


def write_stacks_to(path: Path) -> None:
    """From now on, write the stacks of all threads there on a crash, and on ``ask``.

    Whoever has turned faulthandler on already sees crashes where he chose to.
    """
    try:
        file = open(path, "w")  # noqa: SIM115  (faulthandler keeps it for as long as the process lives)
    except OSError:
        return
    if not faulthandler.is_enabled():
        faulthandler.enable(file)
    if hasattr(signal, "SIGRTMAX"):
        faulthandler.register(_question(), file)
    os.register_at_fork(after_in_child=functools.partial(_write_nowhere, file.fileno()))


def ask(pid: int) -> bool:
    """Ask a process for its stacks. Returns whether it will answer; one that would die of it is not asked."""
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next(line.split()[1] for line in file if line.startswith("SigCgt:"))
        if not int(caught, 16) >> (_question() - 1) & 1:
            return False
        os.kill(pid, _question())
    except (OSError, StopIteration):
        return False  # it ended, or this is no Linux
    return True


def main_stack(path: Path) -> list[Place]:
    """The stack that was written last, innermost first: of the thread that crashed, else of the main one."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    _, crashed, last = text.rpartition(_CRASHED)
    threads: list[list[str]] = []
    for line in last.splitlines():
        if line.startswith(_THREADS):
            threads.append([line])
        elif threads:
            threads[-1].append(line)
    current = [lines for lines in threads if crashed and lines[0].startswith(_CURRENT)]
    stacks = [of_written_stack(lines) for lines in [*current, *reversed(threads)]]
    return next(filter(None, stacks), [])


def _write_nowhere(descriptor: int) -> None:
    """In a process forked from the rank, such as one that loads data: its stacks are not the rank's."""
    with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), descriptor, inheritable=False)


def _question() -> int:
    return signal.SIGRTMAX - 2
