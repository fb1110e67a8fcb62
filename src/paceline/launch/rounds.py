"""Rounds of all ranks: started, watched, stopped, until they end well or may not start again.

It is imported while the process that ranks are forked from imports torch.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.launch.attempt import Attempt, AttemptFolder, Screens
from paceline.launch.config import LaunchConfig
from paceline.launch.departure import DepartureWatch
from paceline.launch.failure import only_lost_peers
from paceline.launch.forks import ForkServer
from paceline.launch.guardian import Guardian
from paceline.launch.interrupted import Interrupted
from paceline.launch.job import Job, LocalJob, Outcome, Round, Verdict
from paceline.launch.member import HostsJob
from paceline.launch.rank_environment import Meeting, RankSeat, rank_environment
from paceline.launch.rank_process import may_fork
from paceline.launch.run_folder import RunFolder
from paceline.launch.signals import SignalInbox

_LAST_WORDS = 0.1  # seconds for what a failed rank wrote last to be read, and for others to fail with it
_SETTLE = 1.0  # seconds to wait for the cause when all that is known is that a peer was lost
_RECORDS_LOOK = 2.0  # seconds between two looks at what the ranks record
_GRACE_AFTER_FAILURE = 1.5  # seconds a rank has to end after another one failed
_OUTPUT_LIMIT = 2.0  # seconds for whoever reads our output to take the rest, once we were told to end
_GRACE_AFTER_INTERRUPT = 5.0  # seconds a rank has to end after Ctrl-C, with somebody waiting for it
_GRACE_AFTER_SIGNAL = 30.0  # ... after SIGTERM, which schedulers send half a minute before they kill


class Rounds:
    """Keeps the ranks of this host.

    Args:
        config: what to start.
        run_id: the run's mark.
        logs: folder of the run for the user's logs, if any are wanted.
        scratch: folder of the run that goes when the run does.
        kept: folder of the run that stays when ranks fail.
        guardian: told which sessions to end should the launcher be killed.
        inbox: the signals that come.
    """

    def __init__(
        self,
        config: LaunchConfig,
        run_id: str,
        logs: Path | None,
        scratch: Path,
        kept: RunFolder,
        guardian: Guardian,
        inbox: SignalInbox,
    ) -> None:
        self._config, self._run_id, self._logs, self._scratch = config, run_id, logs, scratch
        self._kept = kept
        self._looked_at = time.monotonic()
        self._guardian, self._inbox = guardian, inbox
        self._screens = Screens.of_this_process()
        self._reader_stuck = False

    def join_job(self, ranks: int) -> Job:
        """The job that this host's so many ranks take part in."""
        config = self._config
        if not config.hosts.several:
            return LocalJob(config.hosts.port, ranks, config.max_restarts, quiet=config.quiet)
        return HostsJob(
            config.hosts,
            ranks,
            config.max_restarts,
            quiet=config.quiet,
            told_to_end=lambda: next(iter(self._inbox.received), None),
            say=self._write,
        )

    def run(self, job: Job, server: ForkServer, shared: Mapping[str, str]) -> int:
        """Run all rounds. Returns the exit status (see ``launcher.launch``).

        Args:
            job: what this host takes part in.
            server: where ranks are forked from.
            shared: what the environments of this host's ranks have in common.
        """
        if self._config.hosts.several:  # whose ranks are to start at one moment, and not when torch is there
            self._forks(server)
        while True:
            now = job.next_round()
            if now.listener is not None:
                server.open_store(now.listener, now.master_addr)
            folder = AttemptFolder(self._logs, self._scratch, now.number, self._kept.path)
            outcome = self._run_round(job, now, folder, server, shared)
            verdict = job.settle(outcome)
            self._report(verdict, outcome, folder)
            if not verdict.again:
                return verdict.status
            server.close_stores()

    def _report(self, verdict: Verdict, outcome: Outcome, folder: AttemptFolder) -> None:
        """Show how a round ended, and keep it beside what the ranks recorded, if ranks failed."""
        failed = outcome.told is None and bool(verdict.report) and (verdict.status != 0 or verdict.counted)
        if failed:
            self._kept.keep = True
            folder.write_report(verdict.report)
            if not self._config.quiet:
                self._write(
                    f"paceline launch: what the ranks recorded is in {self._kept.path} (paceline diagnose)\n"
                )
        self._write(verdict.report)

    def _run_round(
        self, job: Job, now: Round, folder: AttemptFolder, server: ForkServer, shared: Mapping[str, str]
    ) -> Outcome:
        """Start this host's ranks and watch them; none of their processes is left afterwards."""
        seats = _seats(now)
        attempt = Attempt(
            self._config, self._run_id, self._screens, self._guardian, folder, seats,
            server if self._forks(server) else None, server.processes,
        )  # fmt: skip
        try:
            meeting = Meeting(self._run_id, now.master_addr, now.master_port, now.number,
                              self._config.max_restarts, now.store_is_kept, now.interface)  # fmt: skip
            attempt.start(
                {
                    seat.local_rank: rank_environment(
                        shared,
                        seat,
                        meeting,
                        role=self._config.role,
                        error_file=str(folder.error_file(seat.local_rank)),
                        records=str(folder.records),
                    )
                    for seat in seats
                }
            )
            self._watch(attempt, job)
        except Interrupted:
            pass  # while the ranks were being started
        finally:
            self._stop(attempt)
        told = self._inbox.received[0] if self._inbox.told_to_end else None
        outcome = Outcome(tuple(attempt.endings()), told)
        attempt.close()
        return outcome

    def _forks(self, server: ForkServer) -> bool:
        """Whether ranks are forked; where they may be, waits until the server can."""
        return may_fork(self._config) and server.obstacle() is None

    def _watch(self, attempt: Attempt, job: Job) -> None:
        """Until there is a reason to stop the ranks, or none is left."""
        departures = DepartureWatch(self._config.exit_timeout)
        while not self._inbox.told_to_end and not job.stop_requested():
            for number in self._inbox.take_forwarded():
                attempt.pass_on(number)
            if attempt.poll():
                break
            self._look_at_records(attempt, job, departures)
            time.sleep(self._config.look)
        else:
            return
        if attempt.failed:
            job.announce_failure()
        attempt.wait(_LAST_WORDS, until=lambda: False)
        attempt.wait(_SETTLE, until=lambda: self._cause_is_known(attempt) or job.stop_requested())

    def _look_at_records(self, attempt: Attempt, job: Job, departures: DepartureWatch) -> None:
        """Now and then: who makes the others wait, who does not leave, whether anybody can get on."""
        now = time.monotonic()
        if now - self._looked_at < _RECORDS_LOOK:
            return
        self._looked_at = now
        states = attempt.states()
        line, overdue = departures.look(attempt.standings(), states, now)
        told = (f"paceline launch: {line}\n" if line else "") + job.look(states, now)
        if not self._config.quiet:
            self._write(told)
        for each in overdue:
            attempt.end_overdue(each)
            if not (each.lost or self._config.quiet):
                self._write(f"paceline launch: ended rank {each.rank}, whose script had ended well\n")
        if job.deadlocked(states, now):
            attempt.end_deadlock()

    def _cause_is_known(self, attempt: Attempt) -> bool:
        """Whether more is known than lost peers, or no rank of this host is left that could tell more."""
        endings = attempt.endings()
        gone = any(ending.exit_code == 0 for ending in endings)
        said = gone or not only_lost_peers(endings) or attempt.all_scripts_are_over
        return said or self._inbox.told_to_end or attempt.someone_is_frozen()

    def _stop(self, attempt: Attempt) -> None:
        known = len(self._inbox.received)
        number = self._inbox.received[0] if known else signal.SIGTERM
        self._reader_stuck = not attempt.stop(
            number,
            _usual_grace(self._inbox.received) if self._config.grace is None else self._config.grace,
            hurry=lambda: len(self._inbox.received) > known,  # a second Ctrl-C
            output_limit=_OUTPUT_LIMIT if known else None,
        )

    def _write(self, text: str) -> None:
        if text and not self._reader_stuck:
            self._screens.stderr.write(None, text.encode(errors="replace"))


def _usual_grace(received: Sequence[int]) -> float:
    if not received:
        return _GRACE_AFTER_FAILURE
    return _GRACE_AFTER_INTERRUPT if received[0] == signal.SIGINT else _GRACE_AFTER_SIGNAL


def _seats(now: Round) -> list[RankSeat]:
    """The ranks of this host; ranks count through the hosts."""
    mine, before = now.local_world_sizes[now.group_rank], sum(now.local_world_sizes[: now.group_rank])
    return [
        RankSeat(
            rank=before + local_rank,
            local_rank=local_rank,
            world_size=sum(now.local_world_sizes),
            local_world_size=mine,
            group_rank=now.group_rank,
            group_world_size=len(now.local_world_sizes),
        )
        for local_rank in range(mine)
    ]
