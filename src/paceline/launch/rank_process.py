"""One rank as a process: started on a leash, seen to end, not yet reaped.

    SpawnedRank   a program of its own, or a Python of its own
    ForkedRank    forked from the process that has imported torch (``forks.py``)

Note: ended ranks stay unreaped until the attempt is over
    A zombie keeps its number, so the rank's session (``guardian.py`` kills by it) cannot become
    somebody else's meanwhile. ``poll`` therefore looks without reaping.
"""

from __future__ import annotations

import os
import re
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
    """

    def __init__(self, seat: RankSeat, pid: int) -> None:
        self.seat, self.pid = seat, pid
        self.exit_code: int | None = None
        self.ended_at: float | None = None
        self.signalled = False
        self.was_stopped = False

    @property
    def running(self) -> bool:
        """Whether it had not ended when last looked at."""
        return self.exit_code is None

    @property
    def failed(self) -> bool:
        """Ended by itself, and not well."""
        return self.exit_code not in (None, 0) and not self.signalled

    def poll(self) -> None:
        """Look whether it ended; if so set ``ended_at``, and ``exit_code`` (-n when signal n killed it)."""
        if self.running:
            self.exit_code = self._look()
            self.ended_at = None if self.running else time.monotonic()

    def frozen(self) -> bool:
        """Whether it was stopped (SIGSTOP, a debugger), so that it can take no other signal."""
        if self.running and not self.signalled:
            self.was_stopped = _state(self.pid) in ("T", "t")
        return self.running and self.was_stopped

    def send(self, number: int, *, whole_group: bool) -> None:
        """Ask the rank, or its whole process group, to end; an exit after that is no failure."""
        self.poll()
        if self.running:
            self.signalled = True
            _send(self.pid, number, whole_group)

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
    """

    def __init__(
        self, seat: RankSeat, command: Sequence[str], environment: Mapping[str, str], streams: StandardStreams
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
            raise LaunchError(
                f"rank {seat.rank} could not be started: {command[0]}: {error.strerror}"
            ) from None
        super().__init__(seat, self._process.pid)

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
    ) -> None:
        descriptors = (streams.stdin, streams.stdout, streams.stderr)
        super().__init__(seat, server.fork(program, environment, descriptors))
        self._server = server

    def reap(self) -> None:
        if not self.running:
            self._server.reap(self.pid)

    def _look(self) -> int | None:
        return self._server.ending(self.pid)


def rank_program(config: LaunchConfig) -> list[str]:
    """Kind, name and arguments of what ``rank_main.py`` is to run."""
    return ["module" if config.module else "script", config.script, *config.script_arguments]


def rank_command(config: LaunchConfig) -> list[str]:
    """The command line of a rank that is started as a program.

    Python runs unbuffered, so that a crash loses no line.
    """
    if config.no_python:
        return [config.script, *config.script_arguments]
    python = [sys.executable, "-u"]
    if config.module or _is_source(config.script):
        return [*python, rank_main.__file__, *rank_program(config)]
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


def _send(pid: int, number: int, whole_group: bool) -> None:
    try:
        (os.killpg if whole_group else os.kill)(pid, number)
    except ProcessLookupError:
        pass  # the server that keeps its number was killed


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
