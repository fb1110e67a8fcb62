"""One attempt: all ranks of this machine, from their start until none of their processes is left.

start()   for each rank: channels for its output, then the process
poll()    which have ended
stop()    signal -> grace -> SIGKILL to everything that is left of the run -> drain the output
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from paceline.diagnose.afterwards import REPORT
from paceline.errors import LaunchError
from paceline.launch.config import LaunchConfig
from paceline.launch.departure import Overdue, Standing
from paceline.launch.failure import Ending
from paceline.launch.forks import ForkServer
from paceline.launch.guardian import Guardian, kill_run
from paceline.launch.options import STDERR, STDOUT
from paceline.launch.output import Pump, RankStream, Screen
from paceline.launch.rank_environment import RankSeat
from paceline.launch.rank_process import (
    ForkedRank,
    RankProcess,
    SpawnedRank,
    StandardStreams,
    processor_seconds,
    rank_command,
    rank_program,
)
from paceline.launch.terminal import copy_size, open_channel
from paceline.recorder.reading import RankState, read_folder, record_of, with_stack
from paceline.recorder.stacks import ask

_LAST_THREADS = 2.0  # seconds for all threads of a killed rank to be gone; only then is its end reported
_SILENT = 2.0  # seconds without a sign of life, due every second, after which a rank is asked where it stands
_ANSWER = 0.1  # seconds for the answer to be written
_LOOK = 0.02  # seconds between two looks at ranks that are about to end


@dataclass(frozen=True)
class Screens:
    """The launcher's own stdout and stderr."""

    stdout: Screen
    stderr: Screen

    @classmethod
    def of_this_process(cls) -> Screens:
        """The screens of file descriptors 1 and 2, which may well be one and the same."""
        stdout = Screen(1)
        return cls(stdout, Screen(2, beside=stdout))


@dataclass(frozen=True)
class AttemptFolder:
    """Where one attempt's files lie: ``<run>/attempt_<n>/<local rank>/...``.

    Args:
        logs: folder of the run for the user's logs, if any are wanted.
        scratch: folder of the run that goes when the run does.
        attempt: number of the attempt, from 0.
        kept: folder of the run that stays when it fails.
    """

    logs: Path | None
    scratch: Path
    attempt: int
    kept: Path

    @property
    def records(self) -> Path:
        """Where the ranks record what they do."""
        return self.kept / f"attempt_{self.attempt}" / "records"

    def write_report(self, text: str) -> None:
        """Keep what was shown at the end, for ``paceline diagnose``."""
        with contextlib.suppress(OSError):
            self.records.mkdir(parents=True, exist_ok=True)
            aside = self.records.parent / ".report.txt"
            aside.write_text(text)
            aside.rename(self.records.parent / REPORT)

    def error_file(self, local_rank: int) -> Path:
        """Where torch elastic's ``@record`` in this rank writes an exception; makes the folder."""
        return self._of(self.logs or self.scratch, local_rank) / "error.json"

    def told_file(self, local_rank: int) -> Path:
        """Where ``rank_main.py`` in this rank tells how its script ended; makes the folder."""
        return self._of(self.scratch, local_rank) / "told.json"

    def log_file(self, local_rank: int, name: str) -> Path | None:
        """Where the rank's stream of this name is kept, if it is; makes the folder."""
        return self._of(self.logs, local_rank) / f"{name}.log" if self.logs else None

    def _of(self, base: Path, local_rank: int) -> Path:
        folder = base / f"attempt_{self.attempt}" / str(local_rank)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"the folder {str(folder)!r} for the ranks' output cannot be made: {error.strerror}"
            ) from None
        return folder


class Attempt:
    """The ranks of one attempt.

    Args:
        config: what to start.
        run_id: the run's mark in the environment of everything started.
        screens: where output goes.
        guardian: told which sessions to end should the launcher be killed.
        folder: where files go.
        seats: the ranks of this host.
        server: where ranks are forked from; None starts each as a program of its own.
        spare: tells which processes of the run outlive the attempt.
    """

    def __init__(
        self,
        config: LaunchConfig,
        run_id: str,
        screens: Screens,
        guardian: Guardian,
        folder: AttemptFolder,
        seats: Sequence[RankSeat],
        server: ForkServer | None,
        spare: Callable[[], Sequence[int]],
    ) -> None:
        self.folder = folder
        self._server, self._spare = server, spare
        self._config, self._run_id, self._screens, self._guardian = config, run_id, screens, guardian
        self._seats = seats
        self._ranks: list[RankProcess] = []
        self._streams: list[RankStream] = []
        self._stderr: dict[int, RankStream] = {}
        self._terminals: list[tuple[int, int]] = []  # (the real one, the rank's that follows its size)
        self._pump: Pump | None = None
        self._states: dict[int, RankState] = {}
        self._looked_at: float | None = None

    def start(self, environments: Mapping[int, Mapping[str, str]]) -> dict[int, int]:
        """Start every rank; call it from the main thread only (see the leash in ``rank_process.py``).

        Args:
            environments: whole environment by local rank.

        Returns:
            process number by local rank.

        Raises:
            LaunchError: one could not be started; those that were are ended again by ``stop``.
            OSError: so it is, for this host allows no more processes or open files.
            Interrupted: the launcher was told to end meanwhile.
        """
        self._pump = Pump()
        try:
            for seat in self._seats:
                self._start_rank(seat, environments[seat.local_rank])
                self._guardian.watch([rank.pid for rank in self._ranks])
        finally:
            self._pump.start(self._streams)
        return {rank.seat.local_rank: rank.pid for rank in self._ranks}

    def poll(self) -> bool:
        """Look at the ranks. Returns whether there is something to do: one failed, or all ended."""
        for rank in self._ranks:
            rank.poll()
        for real, pseudo in self._terminals:
            copy_size(real, pseudo)
        if self.failed:
            self._take_stock()
        return self.failed or not self.running

    @property
    def failed(self) -> bool:
        """Whether a rank ended by itself, and not well, or is about to."""
        return any(rank.failed for rank in self._ranks)

    @property
    def running(self) -> bool:
        """Whether any rank has not ended yet."""
        return any(rank.running for rank in self._ranks)

    @property
    def all_scripts_are_over(self) -> bool:
        """Whether every rank has at most its interpreter's shutdown before it."""
        return all(rank.status is not None for rank in self._ranks)

    def endings(self) -> list[Ending]:
        """How the ranks ended that have ended, or whose script has."""
        return [self._ending(rank) for rank in self._ranks if rank.status is not None]

    def states(self) -> dict[int, RankState]:
        """What the ranks of this host are doing, by rank, as far as they record it."""
        return read_folder(self.folder.records)

    def standings(self) -> list[Standing]:
        """How far each rank has come."""
        return [
            Standing(rank.seat.rank, rank.ended_at, not rank.running, processor_seconds(rank.pid))
            for rank in self._ranks
        ]

    def end_overdue(self, overdue: Overdue) -> None:
        """End a rank that does not leave Python."""
        next(rank for rank in self._ranks if rank.seat.rank == overdue.rank).end_overdue(overdue.lost)

    def end_deadlock(self) -> None:
        """End all ranks, which wait for each other and for nothing else."""
        self._take_stock()
        for rank in self._ranks:
            rank.end_deadlocked()

    def wait(self, seconds: float, until: Callable[[], bool]) -> None:
        """Give the ranks time to end by themselves.

        Args:
            seconds: how long at most.
            until: asked after each look; true ends the waiting early.
        """
        deadline = time.monotonic() + seconds
        while self.running and not until() and time.monotonic() < deadline:
            time.sleep(_LOOK)
            self.poll()

    def pass_on(self, number: int) -> None:
        """Send a signal to all ranks, which are expected to go on."""
        for rank in self._ranks:
            rank.pass_on(number, whole_group=self._config.no_python)

    def someone_is_frozen(self) -> bool:
        """Whether a rank was stopped (SIGSTOP, a debugger), so that the others may wait for it in vain."""
        frozen = [rank.frozen() for rank in self._ranks]  # asks every one: each remembers its answer
        return any(frozen)

    def stop(
        self, number: int, grace: float, *, hurry: Callable[[], bool], output_limit: float | None
    ) -> bool:
        """End what is left of the attempt; afterwards none of its processes is there any more.

        Args:
            number: the signal that asks ranks to end.
            grace: seconds they have before SIGKILL.
            hurry: asked while waiting; true cuts the grace, and the wait for our reader, short.
            output_limit: seconds to wait for whoever reads our output; None waits until all is passed on.

        Returns:
            Whether all that the ranks wrote has been passed on.
        """
        self.someone_is_frozen()  # each remembers it, as the signal below would hide it
        if self.failed or self.running:
            self._take_stock()
            self._look_again()
        for rank in self._ranks:
            # A Python rank may still need its data loading workers, to get to a checkpoint;
            # another program (a shell, say) does not pass signals on to what it started.
            if not rank.leaving:  # else it may tidy up
                rank.send(number, whole_group=self._config.no_python)
        for rank in self._ranks:
            if rank.was_stopped:  # it can take no other signal
                rank.send(signal.SIGKILL, whole_group=True)
        self.wait(grace, until=hurry)
        for rank in self._ranks:
            rank.send(signal.SIGKILL, whole_group=True)
        kill_run(self._run_id, [rank.pid for rank in self._ranks], self._spare())
        self.wait(_LAST_THREADS, until=lambda: False)
        return self._drain(output_limit, hurry)

    def close(self) -> None:
        """Reap the ended ranks, after the last look at how they ended."""
        self._guardian.watch([])
        for rank in self._ranks:
            rank.reap()

    def _take_stock(self) -> None:
        """Once, when ranks have failed: what was each doing?"""
        if self._looked_at is None:
            self._states, self._looked_at = self.states(), time.monotonic()

    def _look_again(self) -> None:
        """Before ranks are stopped: what has been told since, at an end or because it was asked for."""
        now = time.monotonic()
        silent = [rank for rank in self._ranks if rank.running and self._is_silent(rank, now)]
        asked = [rank for rank in silent if not rank.frozen() and ask(rank.pid)]
        if asked:
            time.sleep(_ANSWER)
        for number in (rank.seat.rank for rank in asked):  # the rest as before: it may go on by it
            self._states[number] = with_stack(self._states[number], record_of(self.folder.records, number))
        # What ranks told that were ended in a deadlock is only that the others were ended, too.
        ended = [rank.seat.rank for rank in self._ranks if rank.status is not None and not rank.deadlocked]
        states = self.states() if ended else {}
        self._states |= {number: states[number] for number in ended if number in states}

    def _is_silent(self, rank: RankProcess, now: float) -> bool:
        state = self._states.get(rank.seat.rank)
        return state is not None and not state.over and now - state.seen > _SILENT

    def _drain(self, limit: float | None, hurry: Callable[[], bool]) -> bool:
        if self._pump is None:
            return True
        self._pump.finish()
        deadline = None if limit is None else time.monotonic() + limit
        while not self._pump.finished(within=0.1):
            if hurry() or (deadline is not None and time.monotonic() > deadline):
                return False
        return True

    def _start_rank(self, seat: RankSeat, environment: Mapping[str, str]) -> None:
        with contextlib.ExitStack() as theirs:
            stdout = self._open_stream(seat, STDOUT, theirs)
            stderr = self._open_stream(seat, STDERR, theirs)
            nothing = theirs.enter_context(open(os.devnull))
            # Two ranks cannot share one keyboard: rank 0 has it (for a debugger), the others none.
            stdin = 0 if seat.rank == 0 and sys.stdin is not None else nothing.fileno()
            streams = StandardStreams(stdin, stdout, stderr)
            self._ranks.append(self._start_process(seat, environment, streams))

    def _start_process(
        self, seat: RankSeat, environment: Mapping[str, str], streams: StandardStreams
    ) -> RankProcess:
        told = self.folder.told_file(seat.local_rank)
        if self._server is None:
            return SpawnedRank(seat, rank_command(self._config, told), environment, streams, told)
        return ForkedRank(seat, self._server, rank_program(self._config), environment, streams, told)

    def _open_stream(self, seat: RankSeat, which: int, theirs: contextlib.ExitStack) -> int:
        """Open one stream of a rank. Returns the descriptor the rank writes to, which ``theirs`` closes."""
        output = self._config.output
        teed = bool(output.teed(seat.local_rank) & which)
        alone = seat.world_size == 1 or (output.rank_0_only and seat.rank == 0)
        natural = not teed and (alone or (seat.rank == 0 and os.isatty(which)))
        shown = bool(output.shown(seat.rank, seat.local_rank) & which)
        terminal = which if natural and shown and os.isatty(which) else None
        log = self._open_log(seat, which)
        reader, writer = open_channel(terminal)
        theirs.callback(os.close, writer)
        if terminal is not None:
            self._terminals.append((terminal, reader))
        stream = RankStream(
            seat.rank,
            reader,
            (self._screens.stdout if which == STDOUT else self._screens.stderr) if shown else None,
            self._screens.stderr,
            prefix=None if natural else f"[rank{seat.rank}]: ".encode(),
            file=log,
            keep_tail=which == STDERR,
        )
        self._streams.append(stream)
        if which == STDERR:
            self._stderr[seat.rank] = stream
        return writer

    def _open_log(self, seat: RankSeat, which: int) -> BinaryIO | None:
        if not self._config.output.logged(seat.local_rank) & which:
            return None
        path = self.folder.log_file(seat.local_rank, "stdout" if which == STDOUT else "stderr")
        return open(path, "wb", buffering=0) if path else None

    def _ending(self, rank: RankProcess) -> Ending:
        assert rank.status is not None
        assert rank.ended_at is not None
        stderr = self._stderr[rank.seat.rank]
        local_rank = rank.seat.local_rank
        log = self.folder.log_file(local_rank, "stderr")
        logged = self._config.output.logged(local_rank) & STDERR
        return Ending(
            rank=rank.seat.rank,
            pid=rank.pid,
            exit_code=rank.status,
            ended_at=rank.ended_at,
            stopped=rank.signalled,
            stderr=stderr.tail,
            traceback_at=stderr.traceback_at,
            error_file=_read(self.folder.error_file(local_rank)) or _read(rank.told),
            log=str(log) if log and logged else None,
            frozen=rank.was_stopped,
            overstayed=rank.overstayed,
            deadlocked=rank.deadlocked,
            state=self._states.get(rank.seat.rank),
            looked_at=self._looked_at or rank.ended_at,
        )


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
