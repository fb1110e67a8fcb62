"""What a launch is to do, after all options have been read and checked."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.launch.options import STDERR, STDOUT

MAIN_PORT = 29500  # where launchers of several hosts meet when no port is named; torchrun's number
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)  # passed on to the ranks, which go on
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # passed on; the launch ends


@dataclass(frozen=True)
class Hosts:
    """Which hosts take part, and where their launchers meet.

    Attributes:
        least, most: how many hosts; different when the job is elastic.
        rank: which of them this one is; None when ranks are given out by arrival.
        address: of the main host, where the launchers meet; None with a single host.
        port: TCP port there; 0 takes a free one (single host only).
        job: launchers that name another job are turned away.
        is_main: whether this host is the main one; None when its address tells.
        join_timeout: seconds to wait for enough hosts.
        last_call: seconds to wait for more hosts once there are enough.
        silence: seconds without a word after which a host counts as lost.
        local_address: this host's address in the common network; None finds out.
    """

    least: int = 1
    most: int = 1
    rank: int | None = None
    address: str | None = None
    port: int = 0
    job: str = "none"
    is_main: bool | None = None
    join_timeout: float = 600.0
    last_call: float = 30.0
    silence: float = 30.0
    local_address: str | None = None

    @property
    def elastic(self) -> bool:
        """Whether hosts may come and go."""
        return self.least < self.most

    @property
    def several(self) -> bool:
        """Whether there is anybody to meet."""
        return self.most > 1 or self.address is not None


@dataclass(frozen=True)
class Output:
    """Where the ranks' output goes.

    Attributes:
        log_dir: folder for files; None writes none unless a stream is chosen for one.
        tee: streams (bits 1: stdout, 2: stderr), for all or by local rank, that go to a file and,
            prefixed with the rank, to the screen. None: not chosen.
        redirects: streams that go to a file only, chosen alike.
        rank_0_only: show nothing of other ranks.
        local_ranks: show these local ranks only; empty shows all.
    """

    log_dir: str | None = None
    tee: int | Mapping[int, int] | None = None
    redirects: int | Mapping[int, int] = 0
    rank_0_only: bool = False
    local_ranks: tuple[int, ...] = ()

    def teed(self, local_rank: int) -> int:
        """The streams of one rank that ``tee`` chose."""
        return _of_rank(self.tee or 0, local_rank)

    def redirected(self, local_rank: int) -> int:
        """The streams of one rank that do not reach the screen because a file has them."""
        return _of_rank(self.redirects, local_rank)

    def logged(self, local_rank: int) -> int:
        """The streams of one rank that are written to files."""
        chosen = self.teed(local_rank) | self.redirected(local_rank)
        if self.tee is None and not self.redirects:
            return STDOUT | STDERR if self.log_dir else 0
        return chosen

    def shown(self, rank: int, local_rank: int) -> int:
        """The streams of one rank that reach the screen."""
        if (self.rank_0_only and rank != 0) or (self.local_ranks and local_rank not in self.local_ranks):
            return 0
        return (STDOUT | STDERR) & ~self.redirected(local_rank)

    @property
    def needs_folder(self) -> bool:
        """Whether streams are to be written to files, whether or not a folder was named for them."""
        return bool(self.tee) or bool(self.redirects)


@dataclass(frozen=True)
class LaunchConfig:
    """What to start, where, how often, and where its output goes.

    Attributes:
        script: path of a Python script, name of a module, or name of a program.
        script_arguments: handed to every rank as they are.
        module: ``script`` is the name of a module, started as ``python -m`` does.
        no_python: ``script`` is a program, started without the Python interpreter.
        ranks_per_host: None means one per device, or 1 without a device.
        cpu: leave accelerators alone.
        gpu_ids: devices to show to the ranks; None shows all.
        role: ROLE_NAME of the ranks.
        fork: start Python ranks by forking a process that has imported torch.
        hosts: which hosts take part.
        output: where output goes.
        variables: set in the environment of every rank.
        max_restarts: how often all ranks are started again after one failed.
        grace: seconds a rank has to end before SIGKILL; None is 1.5 after a failure, 5 after
            Ctrl-C, 30 after another signal.
        exit_timeout: seconds a rank has to leave Python when all scripts have ended; None: see
            ``departure.py``.
        signals: those that are passed on to the ranks.
        look: seconds between two looks at the ranks.
        quiet: report the first failure's own words only.
    """

    script: str
    script_arguments: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    ranks_per_host: int | None = None
    cpu: bool = False
    gpu_ids: str | None = None
    role: str = "default"
    fork: bool = True
    hosts: Hosts = field(default_factory=Hosts)
    output: Output = field(default_factory=Output)
    variables: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    grace: float | None = None
    exit_timeout: float | None = None
    signals: tuple[int, ...] = (*ENDING, *FORWARDED)
    look: float = 0.05
    quiet: bool = False


def _of_rank(choice: int | Mapping[int, int], local_rank: int) -> int:
    return choice if isinstance(choice, int) else choice.get(local_rank, 0)
