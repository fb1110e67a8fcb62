"""The launcher of one host: rounds of all ranks, until they end well or may not start again.

    launch(config)
      while True:
        job.next_round()    who is in the job, where its ranks meet     (job.py, member.py)
        start the ranks                                                (attempt.py)
        watch               until one failed, all ended, another host failed, or a signal came
        stop                what is left of the ranks                      (rounds.py)
        job.settle()        -> the report, shown last                  (failure.py); again, or the end

Note: why this is not torch elastic's agent
    ``LocalElasticAgent`` waits a fixed 30 s before SIGKILL when a rank failed, leaves ranks training
    when it is killed itself, writes torn lines where ranks share a pipe, names the rank that was gone
    first, waits in calls that let no signal through, tells other hosts nothing, and takes two seconds
    to import. Its environment variables and its words (rank, restart, rendezvous) are kept.
"""

from __future__ import annotations

import errno
import resource
import shutil
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from paceline import environment
from paceline.errors import LaunchError
from paceline.launch.config import LaunchConfig
from paceline.launch.devices import VISIBLE, start_counting
from paceline.launch.forks import ForkServer
from paceline.launch.guardian import Guardian
from paceline.launch.interrupted import Interrupted
from paceline.launch.output import Screen
from paceline.launch.rank_environment import shared_environment
from paceline.launch.rank_process import rank_program
from paceline.launch.run_folder import RunFolder, temporary_folder
from paceline.launch.signals import SignalInbox
from paceline.launch.terminal import open_standard_descriptors

# What a host may have too little of -> the limit that says how much, and what to do.
_LIMITS = {
    errno.EMFILE: (resource.RLIMIT_NOFILE, "Allow more open files, some five for each rank (`ulimit -n`)"),
    errno.EAGAIN: (resource.RLIMIT_NPROC, "Allow more processes and threads (`ulimit -u`)"),
    errno.ENOMEM: (None, "Start fewer ranks, or free memory"),
    errno.ENOSPC: (None, "Free space on the disk, or set TMPDIR to a folder with more"),
}


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
    open_standard_descriptors()
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:12]}"
    logs = _log_folder(config, run_id)
    scratch = temporary_folder("paceline-")
    inherited = environment.snapshot()
    try:
        with (
            _told_plainly_what_is_short(),
            RunFolder(logs) as kept,
            SignalInbox(config.signals) as inbox,
            Guardian(run_id, str(scratch), inherited) as guardian,
        ):
            try:
                start = _Start(config, run_id, inherited, inbox)
                with closing(start.server()) as server:
                    # Here, as the server has begun to import torch.
                    from paceline.launch.rounds import Rounds

                    rounds = Rounds(config, run_id, logs, scratch, kept, guardian, inbox)
                    with closing(rounds.join_job(start.ranks)) as job:
                        return rounds.run(job, server, start.shared())
            except Interrupted:  # before there was any rank
                number = inbox.received[0]
                Screen(2).write(None, f"paceline launch: ended by {signal.Signals(number).name}\n".encode())
                return 128 + number
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _told_plainly_what_is_short() -> Iterator[None]:
    """Turn a refusal of the host to give more of something into words."""
    try:
        yield
    except OSError as error:
        limit = _LIMITS.get(error.errno or 0)
        if limit is None:
            raise
        kind, words = limit
        now = f"; it is {resource.getrlimit(kind)[0]} now" if kind is not None else ""
        raise LaunchError(f"the launcher cannot go on: {error.strerror}. {words}{now}") from None


class _Start:
    """What is found out and set up before there are ranks.

    Args:
        config: what to start.
        run_id: the run's mark.
        inherited: the launcher's own environment.
        inbox: the signals that come.

    Attributes:
        ranks: number of ranks of this host.
    """

    def __init__(
        self, config: LaunchConfig, run_id: str, inherited: Mapping[str, str], inbox: SignalInbox
    ) -> None:
        self._config, self._run_id, self._inherited, self._inbox = config, run_id, inherited, inbox
        self._count = self._start_counting()
        self.ranks = config.ranks_per_host or max(1, min(self._count()[0], self._most_devices()))

    def server(self) -> ForkServer:
        """Start the process that ranks are forked from."""
        before_torch = self._environment(self._config.cpu, {})
        return ForkServer(rank_program(self._config), before_torch, self._told_to_end)

    def shared(self) -> dict[str, str]:
        """What the environments of this host's ranks have in common; waits until devices are counted."""
        devices, kind = self._count()
        return self._environment(devices == 0, self._visible_devices(kind))

    def _environment(self, use_cpu: bool, variables: Mapping[str, str]) -> dict[str, str]:
        return shared_environment(
            self._inherited,
            {**self._config.variables, **variables},
            local_world_size=self.ranks,
            use_cpu=use_cpu,
            single_host=not self._config.hosts.several,
            run_id=self._run_id,
        )

    def _start_counting(self) -> Callable[[], tuple[int, str]]:
        """Begin to count devices, where nobody has said that there are none."""
        return (lambda: (0, "cpu")) if self._config.cpu else start_counting(self._told_to_end)

    def _told_to_end(self) -> bool:
        return self._inbox.told_to_end

    def _most_devices(self) -> int:
        ids = self._config.gpu_ids
        return sys.maxsize if ids is None else len(ids.split(","))

    def _visible_devices(self, kind: str) -> dict[str, str]:
        ids = self._config.gpu_ids
        if ids is None:
            return {}
        return {VISIBLE.get(kind, "CUDA_VISIBLE_DEVICES"): ids}


def _log_folder(config: LaunchConfig, run_id: str) -> Path | None:
    """The run's own folder below --log_dir; with --tee or --redirects alone one in the temporary folder."""
    if config.output.log_dir is not None:
        return Path(config.output.log_dir).absolute() / run_id
    if config.output.needs_folder:
        folder = temporary_folder("paceline-logs-") / run_id
        print(f"paceline launch: the ranks' output is also in {folder}", file=sys.stderr)
        return folder
    return None
