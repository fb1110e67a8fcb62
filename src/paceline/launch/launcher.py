"""The launcher of one host: rounds of all ranks, until they end well or may not start again.

    launch(config)
      while True:
        job.next_round()    who is in the job, where its ranks meet     (job.py, member.py)
        start the ranks                                                (attempt.py)
        watch               until one failed, all ended, another host failed, or a signal came
        stop                what is left of the ranks
        job.settle()        -> the report, shown last                  (failure.py); again, or the end

Note: why this is not torch elastic's agent
    ``LocalElasticAgent`` waits a fixed 30 s before SIGKILL when a rank failed, leaves ranks training
    when it is killed itself, writes torn lines where ranks share a pipe, names the rank that was gone
    first, waits in calls that let no signal through, tells other hosts nothing, and takes two seconds
    to import. Its environment variables and its words (rank, restart, rendezvous) are kept.
"""

from __future__ import annotations

import shutil
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from paceline import environment
from paceline.diagnose.stragglers import StragglerWatch
from paceline.errors import LaunchError
from paceline.launch.attempt import Attempt, AttemptFolder, Screens
from paceline.launch.config import LaunchConfig
from paceline.launch.departure import DepartureWatch
from paceline.launch.devices import VISIBLE, start_counting
from paceline.launch.failure import only_lost_peers
from paceline.launch.forks import ForkServer
from paceline.launch.guardian import Guardian
from paceline.launch.interrupted import Interrupted
from paceline.launch.job import Job, LocalJob, Outcome, Round, Verdict
from paceline.launch.member import HostsJob
from paceline.launch.rank_environment import Meeting, RankSeat, rank_environment, shared_environment
from paceline.launch.rank_process import may_fork, rank_program
from paceline.launch.run_folder import RunFolder, temporary_folder
from paceline.launch.signals import SignalInbox

_LAST_WORDS = 0.1  # seconds for what a failed rank wrote last to be read, and for others to fail with it
_SETTLE = 1.0  # seconds to wait for the cause when all that is known is that a peer was lost
_RECORDS_LOOK = 2.0  # seconds between two looks at what the ranks record
_GRACE_AFTER_FAILURE = 1.5  # seconds a rank has to end after another one failed
_OUTPUT_LIMIT = 2.0  # seconds for whoever reads our output to take the rest, once we were told to end
_GRACE_AFTER_INTERRUPT = 5.0  # seconds a rank has to end after Ctrl-C, with somebody waiting for it
_GRACE_AFTER_SIGNAL = 30.0  # ... after SIGTERM, which schedulers send half a minute before they kill


def launch(config: LaunchConfig) -> int:
    """Start the ranks, wait for them, and restart or report when one fails.

    Must be called from the main thread.

    Returns:
        Exit status: 0 when all ranks ended well; the first failed rank's own (128 + signal when one
        killed it); 128 + signal when a launcher was told to end.

    Raises:
        LaunchError: the ranks cannot be started.
    """
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("paceline launch must run in the main thread, which alone can receive signals")
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:12]}"
    logs = _log_folder(config, run_id)
    scratch = temporary_folder("paceline-")
    inherited = environment.snapshot()
    try:
        with (
            RunFolder(logs) as kept,
            SignalInbox(config.signals) as inbox,
            Guardian(run_id, str(scratch), inherited) as guardian,
        ):
            return _Launcher(config, run_id, logs, scratch, kept, guardian, inbox).run(inherited)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class _Launcher:
    """Keeps the ranks of this host."""

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
        self._stragglers, self._looked_at = StragglerWatch(), time.monotonic()
        self._guardian, self._inbox = guardian, inbox
        self._screens = Screens.of_this_process()
        self._reader_stuck = False

    def run(self, inherited: Mapping[str, str]) -> int:
        """Run all rounds. Returns the exit status (see the function ``launch``)."""
        try:
            return self._run(inherited)
        except Interrupted:  # before there was any rank
            number = self._inbox.received[0]
            self._write(f"paceline launch: ended by {signal.Signals(number).name}\n")
            return 128 + number

    def _run(self, inherited: Mapping[str, str]) -> int:
        count = self._start_counting()
        ranks = self._config.ranks_per_host or max(1, min(count()[0], self._most_devices()))

        def shared(use_cpu: bool, variables: Mapping[str, str]) -> dict[str, str]:
            return shared_environment(
                inherited,
                {**self._config.variables, **variables},
                local_world_size=ranks,
                use_cpu=use_cpu,
                single_host=not self._config.hosts.several,
                run_id=self._run_id,
            )

        with ExitStack() as stack:
            before_torch = shared(self._config.cpu, {})
            server = ForkServer(rank_program(self._config), before_torch, self._told_to_end)
            stack.callback(server.close)
            job = self._join_job(ranks)
            stack.callback(job.close)
            devices, kind = count()
            return self._rounds(job, server, shared(devices == 0, self._visible_devices(kind)))

    def _start_counting(self) -> Callable[[], tuple[int, str]]:
        """Begin to count devices, where nobody has said that there are none."""
        return (lambda: (0, "cpu")) if self._config.cpu else start_counting(self._told_to_end)

    def _told_to_end(self) -> bool:
        return self._inbox.told_to_end

    def _join_job(self, ranks: int) -> Job:
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

    def _rounds(self, job: Job, server: ForkServer, shared: Mapping[str, str]) -> int:
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
                              self._config.max_restarts, now.interface)  # fmt: skip
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
            self._look_at_records(attempt, departures)
            time.sleep(self._config.look)
        else:
            return
        if attempt.failed:
            job.announce_failure()
        attempt.wait(_LAST_WORDS, until=lambda: False)
        attempt.wait(_SETTLE, until=lambda: self._cause_is_known(attempt) or job.stop_requested())

    def _look_at_records(self, attempt: Attempt, departures: DepartureWatch) -> None:
        """Now and then: who makes the others wait, who does not leave."""
        now = time.monotonic()
        if now - self._looked_at < _RECORDS_LOOK:
            return
        self._looked_at = now
        states = attempt.states()
        line, overdue = departures.look(attempt.standings(), states, now)
        lines = [line, self._stragglers.look(states, now)]
        if not self._config.quiet:
            self._write("".join(f"paceline launch: {line}\n" for line in filter(None, lines)))
        for each in overdue:
            attempt.end_overdue(each)
            if not (each.lost or self._config.quiet):
                self._write(f"paceline launch: ended rank {each.rank}, whose script had ended well\n")

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

    def _most_devices(self) -> int:
        ids = self._config.gpu_ids
        return sys.maxsize if ids is None else len(ids.split(","))

    def _visible_devices(self, kind: str) -> dict[str, str]:
        ids = self._config.gpu_ids
        if ids is None:
            return {}
        return {VISIBLE.get(kind, "CUDA_VISIBLE_DEVICES"): ids}

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


def _log_folder(config: LaunchConfig, run_id: str) -> Path | None:
    """The run's own folder below --log_dir; with --tee or --redirects alone one in the temporary folder."""
    if config.output.log_dir is not None:
        return Path(config.output.log_dir).absolute() / run_id
    if config.output.needs_folder:
        folder = temporary_folder("paceline-logs-") / run_id
        print(f"paceline launch: the ranks' output is also in {folder}", file=sys.stderr)
        return folder
    return None
