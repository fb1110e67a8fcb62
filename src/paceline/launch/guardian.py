"""A small process that outlives the launcher by a moment and takes with it whatever the launcher started.

    launcher                              guardian (its own session, no signal of the terminal reaches it)
    starts it, holds a pipe to it    ->   waits for a line, or for the end of the pipe
    started ranks: "sessions 12 13"  ->   remembers
    ends, in any way, SIGKILL too    ->   end of pipe: kill what is left of the run, remove its folder

Note: how the processes of a run are found
    A rank starts helpers (data loading workers, compilers), and those may leave its process
    group. All of them carry TORCHELASTIC_RUN_ID in the environment they were started with,
    which /proc shows; and most are still in the session that their rank was started in. Either
    is enough to be found. A session number cannot have passed to a stranger: the launcher
    leaves ended ranks unreaped while their attempt lasts.

Note: the ranks' own leash
    Ranks also ask the kernel to die with the launcher (``rank_process.py``), should somebody
    kill this process as well. That leash does not reach the ranks' children; this one does.

It runs as a script of its own and needs nothing but the standard library, so that it is up
before the launcher has imported torch.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from types import TracebackType

RUN_ID_VARIABLE = "TORCHELASTIC_RUN_ID"
_SWEEP_LIMIT = 5.0  # seconds; a process in uninterruptible sleep may take longer than that to die


class Guardian:
    """The launcher's side: starts the guardian, keeps it informed, and ends it.

    Leaving the context ends the guardian's watch, and with it whatever is left of the run.

    Args:
        run_id: value of TORCHELASTIC_RUN_ID in the environment of all ranks of the run.
        folder: the run's own temporary folder, removed at the end.
        environment: the launcher's environment. Should the launcher be part of another run, that run's
            mark is left out: when the outer run is swept away, this guardian has its own to see to.
    """

    def __init__(self, run_id: str, folder: str, environment: Mapping[str, str]) -> None:
        self._environment = {name: value for name, value in environment.items() if name != RUN_ID_VARIABLE}
        self._command = [sys.executable, "-I", "-S", os.path.abspath(__file__), run_id, folder]

    def __enter__(self) -> Guardian:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self._environment,
            cwd="/",
            start_new_session=True,
        )
        return self

    def watch(self, sessions: Collection[int]) -> None:
        """Tell the guardian which sessions the ranks of this attempt live in."""
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(("sessions " + " ".join(map(str, sessions)) + "\n").encode())
            pipe.flush()
        except BrokenPipeError:
            pass  # somebody killed the guardian: the ranks still have their own leash

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pipe.close()
        except BrokenPipeError:
            pass
        try:
            self._process.wait(2 * _SWEEP_LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def kill_run(run_id: str, sessions: Collection[int], spare: Collection[int] = ()) -> None:
    """SIGKILL every process of a run, its caller excepted, and wait until they are gone.

    Args:
        run_id: see ``Guardian``.
        sessions: the sessions the ranks were started in.
        spare: processes that the next attempt needs as well.
    """
    mark = f"{RUN_ID_VARIABLE}={run_id}".encode()
    deadline = time.monotonic() + _SWEEP_LIMIT
    while time.monotonic() < deadline:
        found = [pid for pid in _processes_of(mark, sessions) if pid not in spare]
        for pid in found:
            _kill(pid)
        if not found:
            return
        time.sleep(0.02)


def _processes_of(mark: bytes, sessions: Collection[int]) -> Iterator[int]:
    """Living processes that carry the mark in their environment, or are in one of the sessions."""
    if not os.path.isdir("/proc/self"):
        yield from _living_sessions(sessions)
        return
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            state, session = _state_and_session(entry)
            if state not in ("Z", "X", "") and (session in sessions or _carries(entry, mark)):
                yield int(entry)


def _living_sessions(sessions: Collection[int]) -> Iterator[int]:
    """Without /proc: the process groups that the ranks lead, as the negative numbers kill() takes."""
    for session in sessions:
        try:
            os.kill(-session, 0)
        except OSError:
            continue
        yield -session


def _state_and_session(pid: str) -> tuple[str, int]:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[3])
    except (OSError, IndexError):
        return "", 0  # ended meanwhile


def _carries(pid: str, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:
        return False  # ended meanwhile, or another user's


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass  # ended meanwhile, or became another user's: there is nothing more to do here


def _stand_guard(run_id: str, folder: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        sessions = {int(word) for word in line.split()[1:]}
    kill_run(run_id, sessions)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _stand_guard(*sys.argv[1:])
