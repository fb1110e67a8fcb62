"""The launcher: torch elastic's agent with ranks, watching and reporting of our own.

    launch(config)
      agent.run()                  torch elastic's loop, for one attempt after another:
        _rendezvous                  who is in the job, where its ranks meet    (rendezvous.py)
        _start_workers               start the ranks                            (attempt.py)
        _monitor_workers             look: healthy, succeeded, failed, told to end
        _stop_workers                after a failure, before the next attempt
      report                       the first failure, last on the screen        (failure.py)

Note: what is torch elastic's and what is not
    Elastic's loop, rendezvous interface and states are used as they are, so that more
    machines are another ``RendezvousHandler``. Its ``LocalElasticAgent`` is not: it waits a
    fixed 30 s before SIGKILL when a rank failed, leaves ranks training when it is killed itself,
    writes torn lines where ranks share a pipe, and names the rank that was gone first.

Note: no event carries the machine's name
    For each event elastic looks up the machine's full name, which takes seconds where that
    does not resolve. ``_construct_event`` is replaced by one that does not ask.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from paceline import environment
from paceline.errors import LaunchError
from paceline.launch.attempt import Attempt, AttemptFolder, Screens
from paceline.launch.failure import Ending, describe, exit_status, first_failure, only_lost_peers
from paceline.launch.flags import LaunchConfig, device_count, resolve_num_processes
from paceline.launch.guardian import Guardian
from paceline.launch.rank_environment import Meeting, RankSeat, rank_environment
from paceline.launch.rendezvous import LocalRendezvous
from paceline.launch.signals import SignalInbox

_LOOK = 0.05  # seconds between two looks at the ranks
_LAST_WORDS = 0.1  # seconds for what a failed rank wrote last to be read, and for others to fail with it
_SETTLE = 1.0  # seconds to wait for the cause when all that is known is that a peer was lost
_GRACE_AFTER_FAILURE = 2.0  # seconds a rank has to end after another one failed
_OUTPUT_LIMIT = 2.0  # seconds for whoever reads our output to take the rest, once we were told to end
_GRACE_AFTER_SIGNAL = 5.0  # seconds a rank has to end when the launcher was told to


def launch(config: LaunchConfig) -> int:
    """Start the ranks, wait for them, and restart or report when one fails.

    Must be called from the main thread.

    Returns:
        Exit status: 0 when all ranks ended well; the first failed rank's own (128 + signal when one
        killed it); 128 + signal when the launcher itself was told to end.

    Raises:
        LaunchError: the ranks cannot be started.
    """
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("paceline launch must run in the main thread, which alone can receive signals")
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:12]}"
    logs = _log_folder(config, run_id)
    scratch = Path(tempfile.mkdtemp(prefix="paceline-"))
    inherited = environment.snapshot()
    try:
        with SignalInbox() as inbox, Guardian(run_id, str(scratch), inherited) as guardian:
            return _LocalAgent(config, run_id, logs, scratch, guardian, inbox).launch()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class _ToldToEndError(Exception):
    """The launcher received a signal, and has ended its ranks."""


class _LocalAgent(SimpleElasticAgent):
    """Keeps the ranks of this machine; ``run`` (torch elastic's) drives the underscored methods."""

    def __init__(
        self,
        config: LaunchConfig,
        run_id: str,
        logs: Path | None,
        scratch: Path,
        guardian: Guardian,
        inbox: SignalInbox,
    ) -> None:
        spec = WorkerSpec(
            role="default",
            local_world_size=resolve_num_processes(config),
            rdzv_handler=LocalRendezvous(run_id, config.main_process_port),
            entrypoint=config.script,
            max_restarts=config.max_restarts,
            monitor_interval=_LOOK,
        )
        super().__init__(spec)
        self._config, self._run_id, self._logs, self._scratch = config, run_id, logs, scratch
        self._guardian, self._inbox = guardian, inbox
        self._screens = Screens.of_this_process()
        self._use_cpu = config.cpu or device_count() == 0
        self._attempt: Attempt | None = None
        self._number = 0
        self._reader_stuck = False
        self._endings: list[Ending] = []

    def launch(self) -> int:
        """Run all attempts. Returns the exit status (see the function ``launch``)."""
        try:
            result = self.run()
        except _ToldToEndError:
            number = self._inbox.received[0]
            self._say(f"ended by {signal.Signals(number).name}; no process of the run is left")
            return 128 + number
        if not result.is_failed():
            return 0
        self._report()
        return exit_status(first_failure(self._endings))

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._number = self._config.max_restarts - self._remaining_restarts
        meeting = Meeting(
            run_id=self._run_id,
            master_addr=worker_group.master_addr,  # type: ignore[arg-type]  # elastic says None here
            master_port=worker_group.master_port,  # type: ignore[arg-type]
            attempt=self._number,
            max_restarts=self._config.max_restarts,
        )
        seats = [_seat(worker, worker_group) for worker in worker_group.workers]
        folder = AttemptFolder(self._logs, self._scratch, self._number)
        self._attempt = Attempt(self._config, self._run_id, self._screens, self._guardian, folder, seats)
        inherited = environment.snapshot()
        return self._attempt.start(
            {
                seat.local_rank: rank_environment(
                    inherited,
                    seat,
                    meeting,
                    use_cpu=self._use_cpu,
                    error_file=str(folder.error_file(seat.local_rank)),
                )
                for seat in seats
            }
        )

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        attempt = self._attempt
        assert attempt is not None
        if self._inbox.received:
            self._end_attempt(signal.Signals(self._inbox.received[0]), _GRACE_AFTER_SIGNAL)
            raise _ToldToEndError
        if not attempt.poll():
            return RunResult(state=WorkerState.HEALTHY)
        attempt.wait(_LAST_WORDS, until=lambda: False)
        attempt.wait(
            _SETTLE, until=lambda: not only_lost_peers(attempt.endings()) or bool(self._inbox.received)
        )
        self._end_attempt(signal.SIGTERM, _GRACE_AFTER_FAILURE)
        if self._inbox.received:
            raise _ToldToEndError
        failures = {ending.rank: self._failure(ending) for ending in self._endings if ending.failed}
        if failures:
            return RunResult(state=WorkerState.FAILED, failures=failures)
        values = {ending.rank: None for ending in self._endings}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=values)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._report()
        self._say(f"starting all ranks again (attempt {self._number + 2} of {self._config.max_restarts + 1})")
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """The ranks are gone already; lets go of the store, whose port the next attempt may need."""
        worker_group.store = self._store = None

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Elastic's last word, also after an exception: whatever is still there ends now."""
        self._end_attempt(death_sig, _GRACE_AFTER_FAILURE)

    def _end_attempt(self, number: signal.Signals, grace: float) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        known = len(self._inbox.received)
        self._reader_stuck = not attempt.stop(
            number,
            grace,
            hurry=lambda: len(self._inbox.received) > known,  # a second Ctrl-C
            output_limit=_OUTPUT_LIMIT if known else None,
        )
        self._endings = attempt.endings()
        attempt.close()

    def _failure(self, ending: Ending) -> ProcessFailure:
        return ProcessFailure(ending.rank, ending.pid, ending.exit_code, error_file="")

    def _report(self) -> None:
        text = describe(self._endings, attempt=self._number, max_restarts=self._config.max_restarts)
        self._write(text)

    def _say(self, line: str) -> None:
        self._write(f"paceline launch: {line}\n")

    def _write(self, text: str) -> None:
        if not self._reader_stuck:
            self._screens.stderr.write(None, text.encode(errors="replace"))

    def _construct_event(
        self,
        state: str,
        source: EventSource,
        worker: Worker | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
        exit_code: int | None = None,
        worker_pid: int | None = None,
    ) -> Event:
        return Event(
            f"torchelastic.worker.status.{state}", source, metadata={"run_id": self._run_id, "state": state}
        )


def _seat(worker: Worker, group: WorkerGroup) -> RankSeat:
    return RankSeat(
        rank=worker.global_rank,
        local_rank=worker.local_rank,
        world_size=worker.world_size,
        local_world_size=group.spec.local_world_size,
        group_rank=group.group_rank,  # type: ignore[arg-type]  # elastic says None here
        group_world_size=group.group_world_size,  # type: ignore[arg-type]
    )


def _log_folder(config: LaunchConfig, run_id: str) -> Path | None:
    """The run's own folder below --log_dir; with --tee alone one in the temporary folder."""
    if config.log_dir is not None:
        return Path(config.log_dir).absolute() / run_id
    if config.tee:
        folder = Path(tempfile.mkdtemp(prefix="paceline-logs-")) / run_id
        print(f"paceline launch: the ranks' output is also in {folder}", file=sys.stderr)
        return folder
    return None
