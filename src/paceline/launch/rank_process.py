"""One rank as a process: started on a leash, seen to end, not yet reaped.

    SpawnedRank   a program of its own, or a Python of its own
    ForkedRank    forked from the process that has imported torch (``forks.py``)

Note: ended ranks stay unreaped until the attempt is over
    A zombie keeps its number, so the rank's session (``guardian.py`` kills by it) cannot become
    somebody else's meanwhile. ``poll`` therefore looks without reaping.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import LaunchError
from paceline.launch import rank_main
from paceline.launch.config import LaunchConfig
from paceline.launch.forks import ForkServer
from paceline.launch.leash import leash
from paceline.launch.rank_environment import RankSeat

# Variables that are read when torch (or what it loads) is imported. A script that sets one before
# it imports torch would set it too late in a process where torch is there already.
_READ_ON_IMPORT = re.compile(
    rb"""["'](?:(?:OMP|MKL|KMP|GOMP|OPENBLAS|TORCH|TORCHDYNAMO|TORCHINDUCTOR|PYTORCH|ATEN|DNNL|ONEDNN)_\w+)["']"""
)


@dataclass(frozen=True)
class StandardStreams:
    """File descriptors that become a rank's stdin, stdout and stderr."""

    stdin: int
    stdout: int
    stderr: int


class RankProcess:
    """A started rank.

    Args:
        seat: which rank it is.
        pid: its process.
        told: the file in which ``rank_main.py`` tells how the script ended.

    Attributes:
        exit_code: what it returned, or -n when signal n killed it; None if it was there when last looked at.
        ended_at: when its script was seen to be over, or it to be gone (monotonic seconds).
        signalled: it was asked to end while its script ran.
        was_stopped: it was found stopped (SIGSTOP, a debugger).
        overstayed: what it was still doing, in words, when it was ended because it did not leave Python; "".
        deadlocked: it was ended because all ranks waited for each other.
    """

    def __init__(self, seat: RankSeat, pid: int, told: Path) -> None:
        self.seat, self.pid, self.told = seat, pid, told
        self.exit_code: int | None = None
        self.ended_at: float | None = None
        self.signalled = False
        self.was_stopped = False
        self.overstayed = ""
        self.deadlocked = False
        self._said: int | None = None

    @property
    def running(self) -> bool:
        """Whether it was there when last looked at."""
        return self.exit_code is None

    @property
    def leaving(self) -> bool:
        """Whether its script is over."""
        return self._said is not None

    @property
    def status(self) -> int | None:
        """Its exit code, as soon as its script is over, whatever ends the interpreter's shutdown then."""
        if self.overstayed or self.deadlocked:
            return 1
        if self._said is None:
            return self.exit_code
        cut_short = self.exit_code == -signal.SIGKILL or (self._said != 0 and (self.exit_code or 0) < 0)
        return self._said if self.running or cut_short else self.exit_code

    @property
    def failed(self) -> bool:
        """Ended by itself, and not well, or is about to."""
        return self.status not in (None, 0) and not self.signalled

    def poll(self) -> None:
        """Look whether its script is over, and whether it is gone."""
        if not self.running:
            return
        self.exit_code = self._look()
        if not (self.leaving or self.signalled):
            self._said = _status_in(self.told)
        if self.ended_at is None and self.status is not None:
            self.ended_at = time.monotonic()

    def frozen(self) -> bool:
        """Whether it was stopped (SIGSTOP, a debugger), so that it can take no other signal."""
        if self.running and not self.signalled:
            self.was_stopped = _state(self.pid) in ("T", "t")
        return self.running and self.was_stopped

    def send(self, number: int, *, whole_group: bool) -> None:
        """Ask the rank, or its whole process group, to end; an end of its script after that is no failure."""
        self.poll()
        if self.running:
            self.signalled = not self.leaving
            _send(self.pid, number, whole_group)

    def end_overdue(self, lost: str) -> None:
        """End a rank that does not leave Python; a failure if ``lost`` tells what it was still doing."""
        self.overstayed = lost
        _send(self.pid, signal.SIGKILL, whole_group=True)

    def end_deadlocked(self) -> None:
        """End a rank that waits for one that waits for it; in native code it can take no other signal."""
        self.deadlocked = True
        _send(self.pid, signal.SIGKILL, whole_group=True)

    def pass_on(self, number: int, *, whole_group: bool) -> None:
        """Send a signal after which the rank is expected to go on."""
        self.poll()
        if self.running:
            _send(self.pid, number, whole_group)

    def reap(self) -> None:
        """Let go of the ended process; its number may be given out again from here on."""
        raise NotImplementedError

    def _look(self) -> int | None:
        raise NotImplementedError


class SpawnedRank(RankProcess):
    """A rank that was started as a program.

    Raises:
        LaunchError: the program cannot be started.
        OSError: this host allows no more processes or open files.
    """

    def __init__(
        self,
        seat: RankSeat,
        command: Sequence[str],
        environment: Mapping[str, str],
        streams: StandardStreams,
        told: Path,
    ) -> None:
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=streams.stdin,
                stdout=streams.stdout,
                stderr=streams.stderr,
                start_new_session=True,
                preexec_fn=leash(),
            )
        except OSError as error:
            if error.filename is None:  # it is not the program, but the host that has no more to give
                raise
            raise LaunchError(
                f"rank {seat.rank} could not be started: {command[0]}: {error.strerror}"
            ) from None
        super().__init__(seat, self._process.pid, told)

    def reap(self) -> None:
        try:
            self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            pass  # stuck in the kernel even after SIGKILL; it is reaped by init when the launcher ends

    def _look(self) -> int | None:
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


class ForkedRank(RankProcess):
    """A rank that was forked from the process that has imported torch."""

    def __init__(
        self,
        seat: RankSeat,
        server: ForkServer,
        program: Sequence[str],
        environment: Mapping[str, str],
        streams: StandardStreams,
        told: Path,
    ) -> None:
        descriptors = (streams.stdin, streams.stdout, streams.stderr)
        super().__init__(seat, server.fork(program, environment, descriptors, told), told)
        self._server = server

    def reap(self) -> None:
        if not self.running:
            self._server.reap(self.pid)

    def _look(self) -> int | None:
        return self._server.ending(self.pid)


def rank_program(config: LaunchConfig) -> list[str]:
    """Kind, name and arguments of what ``rank_main.py`` is to run."""
    return ["module" if config.module else "script", config.script, *config.script_arguments]


def rank_command(config: LaunchConfig, told: Path) -> list[str]:
    """The command line of a rank that is started as a program.

    Python runs unbuffered, so that a crash loses no line.

    Args:
        config: what to start.
        told: see ``RankProcess``.
    """
    if config.no_python:
        return [config.script, *config.script_arguments]
    python = [sys.executable, "-u"]
    if config.module or _is_source(config.script):
        return [*python, rank_main.__file__, str(told), *rank_program(config)]
    return [*python, config.script, *config.script_arguments]


def may_fork(config: LaunchConfig) -> bool:
    """Whether ranks may be forked, as far as the options and the script's text tell."""
    if not config.fork or config.no_python or sys.platform != "linux":
        return False
    if not config.module and not _is_source(config.script):
        return False
    texts = (path.read_bytes() for path in _sources(config) if path.is_file())
    return not any(_READ_ON_IMPORT.search(text) for text in texts)


def _sources(config: LaunchConfig) -> list[Path]:
    """The files that may be the script; a module is looked for where most are, below the working folder."""
    if not config.module:
        return [Path(config.script)]
    path = Path(*config.script.split("."))
    return [path.with_suffix(".py"), path / "__main__.py"]


def _is_source(script: str) -> bool:
    """Whether it is a plain script; Python can start a folder, an archive or a compiled file as well."""
    return os.path.isfile(script) and not script.endswith(".pyc") and not zipfile.is_zipfile(script)


def _status_in(told: Path) -> int | None:
    try:
        return int(json.loads(told.read_text())["status"])
    except OSError:
        return None  # the script is not over


def _send(pid: int, number: int, whole_group: bool) -> None:
    try:
        (os.killpg if whole_group else os.kill)(pid, number)
    except ProcessLookupError:
        pass  # the server that keeps its number was killed


def _state(pid: int) -> str:
    return (_stat(pid) or [""])[0]


def processor_seconds(pid: int) -> float:
    """What a process has used so far; 0 where that cannot be seen."""
    fields = _stat(pid)
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") if len(fields) > 13 else 0.0


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
