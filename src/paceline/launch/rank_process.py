"""One rank as a process: started on a leash, seen to end, not yet reaped.

Note: the leash
    The kernel sends a rank SIGKILL when the thread that started it ends (PR_SET_PDEATHSIG), so
    ranks must be started from the launcher's main thread, which lives as long as the launcher.
    It is set between fork and exec; whoever was orphaned before that notices by its parent.

Note: ended ranks stay unreaped until the attempt is over
    A zombie keeps its number, so the rank's session (``guardian.py`` kills by it) cannot become
    somebody else's meanwhile. ``poll`` therefore looks without reaping.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import LaunchError
from paceline.launch import rank_main
from paceline.launch.flags import LaunchConfig
from paceline.launch.rank_environment import RankSeat

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class StandardStreams:
    """File descriptors that become a rank's stdin, stdout and stderr."""

    stdin: int | None
    stdout: int
    stderr: int


class RankProcess:
    """A started rank.

    Args:
        seat: which rank it is.
        command: program and arguments.
        environment: its whole environment.
        streams: its standard streams; they stay the caller's to close.

    Raises:
        LaunchError: the program cannot be started.
    """

    def __init__(
        self, seat: RankSeat, command: Sequence[str], environment: Mapping[str, str], streams: StandardStreams
    ) -> None:
        self.seat = seat
        self.exit_code: int | None = None
        self.ended_at: float | None = None
        self.signalled = False
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL if streams.stdin is None else streams.stdin,
                stdout=streams.stdout,
                stderr=streams.stderr,
                start_new_session=True,
                preexec_fn=_leash(),
            )
        except OSError as error:
            raise LaunchError(
                f"rank {seat.rank} could not be started: {command[0]}: {error.strerror}"
            ) from None
        self.pid = self._process.pid

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
        if not self.running:
            return
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            self.ended_at = time.monotonic()
            self.exit_code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def send(self, number: int, *, whole_group: bool) -> None:
        """Send a signal to the rank, or to its whole process group; an exit after that is no failure."""
        self.poll()
        if self.running:
            self.signalled = True
            (os.killpg if whole_group else os.kill)(self.pid, number)

    def reap(self) -> None:
        """Let go of the ended process; its number may be given out again from here on."""
        try:
            self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            pass  # stuck in the kernel even after SIGKILL; it is reaped by init when the launcher ends


def rank_command(config: LaunchConfig) -> list[str]:
    """The command line of every rank. Python runs unbuffered, so that a crash loses no line."""
    if config.no_python:
        return [config.script, *config.script_arguments]
    python = [sys.executable, "-u"]
    if config.module:
        return [*python, rank_main.__file__, "module", config.script, *config.script_arguments]
    if _is_source(config.script):
        return [*python, rank_main.__file__, "script", config.script, *config.script_arguments]
    return [*python, config.script, *config.script_arguments]


def _is_source(script: str) -> bool:
    """Whether it is a plain script; Python can start a folder, an archive or a compiled file as well."""
    return os.path.isfile(script) and not script.endswith(".pyc") and not zipfile.is_zipfile(script)


def _leash() -> Callable[[], None] | None:
    """What a rank does between fork and exec: ask to be killed when the launcher dies."""
    if sys.platform != "linux":
        return None
    prctl, launcher = ctypes.CDLL(None).prctl, os.getpid()

    def die_with_launcher() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:
            os._exit(1)

    return die_with_launcher
