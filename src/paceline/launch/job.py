"""A job as its launchers agree on it: rounds of all ranks, and what is done after each.

    Job.next_round()   who is in it, where its ranks meet
    ... the ranks run (attempt.py) ...
    Job.settle()       what all hosts have seen -> report, and: done, again, or the end

``LocalJob`` is the job of a single host. ``HostsJob`` (``member.py``) is that of several, whose
launchers talk to each other.

Note: a fresh store for every round
    torch elastic's own handlers keep one TCPStore over all attempts. The ranks of the second
    attempt then find the addresses that the first one left there and dial dead processes. So
    each round gets a store of its own, on a listening socket that the launcher binds before any
    rank starts: it cannot be lost to another process, and one that is taken is noticed at once.

Note: one rank alone
    It has nobody to meet, and may be a script that starts ranks itself (``torch.multiprocessing.spawn``).
    Those would all wait for a launcher's store at the address they agree on, so there is none then, and the
    rank opens its own, as under Accelerate's launcher.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.diagnose.deadlock import deadlocked
from paceline.diagnose.stragglers import StragglerWatch
from paceline.errors import LaunchError
from paceline.launch.failure import (
    Ending,
    describe,
    exit_status,
    first_failure,
    held_up,
    only_lost_peers,
)
from paceline.recorder.reading import RankState
from paceline.recorder.words import waits

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Round:
    """One time that all ranks run.

    Attributes:
        number: how many rounds there were before.
        group_rank: this host among the hosts.
        local_world_sizes: number of ranks of each host, by group rank.
        master_addr, master_port: where the ranks' store is.
        listener: the store's listening socket, on the host that has it.
        store_is_kept: the launchers keep the store; else the only rank opens it.
        interface: network interface of this host that leads to the others; None for a single host.
    """

    number: int
    group_rank: int
    local_world_sizes: tuple[int, ...]
    master_addr: str
    master_port: int
    listener: socket.socket | None = None
    store_is_kept: bool = True
    interface: str | None = None


@dataclass(frozen=True)
class Outcome:
    """How a round ended on one host.

    Attributes:
        endings: of its ranks.
        told: number of the signal that told its launcher to end, if one did.
    """

    endings: tuple[Ending, ...]
    told: int | None = None


@dataclass(frozen=True)
class Verdict:
    """What follows from a round.

    Attributes:
        again: all ranks are to be started again.
        status: exit status of the launchers when not.
        report: what is shown on every host; may be empty.
        counted: whether starting again uses up one of ``max_restarts``.
    """

    again: bool
    status: int
    report: str = ""
    counted: bool = False


@dataclass(frozen=True)
class Events:
    """What all hosts of a job have seen in one round.

    Attributes:
        endings: of all ranks that are known of, times on one clock.
        lost: hosts that fell silent or whose launcher died, each with what is known, as "h1: why".
        told: host and signal that a launcher was told to end with.
        left: hosts that were told to end and may go, the job being elastic.
        joined: hosts that came while the others ran.
    """

    endings: Sequence[Ending]
    lost: Sequence[str] = ()
    told: tuple[str, int] | None = None
    left: Sequence[str] = ()
    joined: Sequence[str] = ()


class Job(Protocol):
    """What the launcher of one host needs of a job."""

    def next_round(self) -> Round:
        """Wait until all who are to take part are there."""

    def look(self, states: Mapping[int, RankState], now: float) -> str:
        """Compare what this host's ranks record, read now, with the rest of the job; text to show."""

    def deadlocked(self, states: Mapping[int, RankState], now: float) -> bool:
        """Whether the job's ranks wait for each other, as this host's records, read now, and others tell."""

    def stop_requested(self) -> bool:
        """Whether the round is over on this host because of what happened on another one."""

    def announce_failure(self) -> None:
        """Tell the other hosts that a rank failed here, before all is known about it."""

    def settle(self, outcome: Outcome) -> Verdict:
        """Hand in how the round ended here, and wait for what follows."""

    def close(self) -> None:
        """Leave the job."""


class LocalJob(Job):
    """The job of a single host.

    Args:
        port: TCP port of the store, or 0 for a free one in each round.
        ranks: number of ranks.
        max_restarts: how often all ranks are started again after a failure.
        quiet: report the first failure's own words only.
    """

    def __init__(self, port: int, ranks: int, max_restarts: int, *, quiet: bool) -> None:
        self._port, self._ranks, self._max_restarts, self._quiet = port, ranks, max_restarts, quiet
        self._rounds = 0
        self._stragglers = StragglerWatch()

    def next_round(self) -> Round:
        try:
            listener = socket.create_server((LOOPBACK, self._port), backlog=1024)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise LaunchError(
                f"port {self._port} on {LOOPBACK} cannot be used for the ranks to meet: {reason}; "
                f"name another with --main_process_port, or leave it out to take a free one"
            ) from None
        self._rounds += 1
        port, alone = listener.getsockname()[1], self._ranks == 1
        if alone:
            listener.close()
        return Round(
            self._rounds - 1,
            0,
            (self._ranks,),
            LOOPBACK,
            port,
            None if alone else listener,
            store_is_kept=not alone,
        )

    def look(self, states: Mapping[int, RankState], now: float) -> str:
        told = self._stragglers.look(states, now)
        return _line(told) if told else ""

    def deadlocked(self, states: Mapping[int, RankState], now: float) -> bool:
        return len(states) == self._ranks and deadlocked(states.values(), now)

    def stop_requested(self) -> bool:
        return False

    def announce_failure(self) -> None:
        pass

    def settle(self, outcome: Outcome) -> Verdict:
        told = ("", outcome.told) if outcome.told is not None else None
        return judge(
            Events(outcome.endings, told=told), self._rounds - 1, self._max_restarts, quiet=self._quiet
        )

    def close(self) -> None:
        pass


def judge(
    events: Events, restarts: int, max_restarts: int, *, elastic: bool = False, quiet: bool = False
) -> Verdict:
    """What follows from a round. Pure.

    Args:
        events: what was seen.
        restarts: how many of ``max_restarts`` are used up.
        max_restarts: how many there may be.
        elastic: the job may go on with fewer hosts.
        quiet: report the first failure's own words only.
    """
    if events.told is not None:
        host, number = events.told
        where = f" (on {host})" if host else ""
        line = f"ended by {signal.Signals(number).name}{where}; no process of the run is left"
        hang = None if quiet else held_up(events.endings)
        report = (_line(hang.text) if hang is not None else "") + _line(line)
        return Verdict(again=False, status=128 + number, report=report)
    failed = any(ending.failed for ending in events.endings)
    if events.lost and (not failed or only_lost_peers(events.endings)):
        again = elastic or restarts < max_restarts
        after = [] if quiet else [ending for ending in events.endings if ending.failed]
        report = "".join(_line(f"{ending.name} failed after it: {ending.reason[:200]}") for ending in after)
        report += "".join(_line(f"lost a host: {host}") for host in events.lost)
        report += _what_the_rest_waited_for(events.endings)
        return _perhaps_again(report, again, not elastic, 1, restarts, max_restarts)
    if failed:
        report = describe(events.endings, attempt=restarts, max_restarts=max_restarts, quiet=quiet)
        status = exit_status(first_failure(events.endings))
        return _perhaps_again(report, restarts < max_restarts, True, status, restarts, max_restarts)
    if events.joined or events.left:
        report = "".join(_line(f"host {host} has joined") for host in events.joined)
        report += "".join(_line(f"host {host} leaves") for host in events.left)
        return Verdict(True, 0, report + _line("starting all ranks again, on the hosts that are there"))
    return Verdict(again=False, status=0)


def _what_the_rest_waited_for(endings: Sequence[Ending]) -> str:
    states = [ending.state for ending in endings if ending.state is not None]
    text = waits(states, max((ending.looked_at for ending in endings), default=0.0))
    return _line(text) if text else ""


def _perhaps_again(
    report: str, again: bool, counted: bool, status: int, restarts: int, max_restarts: int
) -> Verdict:
    if not again:
        return Verdict(False, status, report)
    count = f" (attempt {restarts + 2} of {max_restarts + 1})" if counted else ""
    return Verdict(True, status, report + _line(f"starting all ranks again{count}"), counted)


def _line(text: str) -> str:
    return f"paceline launch: {text}\n"
