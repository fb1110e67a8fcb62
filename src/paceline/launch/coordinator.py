"""Who is in a job of several hosts, and what all of them do next: decided on the main host.

    GATHERING    launchers connect ("hello", "ready"); enough of them -> "round"
    RUNNING      signs of life; "failed", "outcome", a host lost or joined -> "stop" to all
    COLLECTING   every host hands in its "outcome", or is lost -> "verdict" to all;
                 who said first that it failed hears "stop" once another host has a cause, or is lost
    then GATHERING again, or OVER

It runs in a thread of the main host's launcher, which takes part through a connection like every
other. ``Membership`` is the state and knows no sockets, so that every story can be told to it in
a test; ``Coordinator`` reads, writes and keeps the time.

Note: how a host is lost
    Its launcher's connection ends (the process died), or nothing was heard of it for ``silence``
    seconds: links that are cut heal, so this is long. But when the ranks of others have failed,
    whoever was not heard of for three seconds is the cause, or cannot be asked.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.diagnose.deadlock import deadlocked
from paceline.diagnose.stragglers import StragglerWatch
from paceline.errors import LaunchError
from paceline.launch.config import Hosts
from paceline.launch.failure import Ending
from paceline.launch.job import Events, Verdict, judge
from paceline.launch.wire import BEAT, PROTOCOL, Connection
from paceline.recorder.reading import RankState

_PATIENCE = 3.0  # seconds of silence that make a host lost when others have failed
_TELL = 5.0  # seconds between two lines about hosts that are waited for
_LOOK = 0.1
_RECORDS_LOOK = 2.0  # seconds between two looks at what the ranks of all hosts record
_FRESH = 5.0  # seconds from which on it is not known any more what a rank is doing
_LAST_WORDS = 3.0  # seconds for the others to fetch the verdict before the main host leaves
_GREETING = 5.0  # seconds a new connection has to say who it is

GATHERING, RUNNING, COLLECTING, OVER = "gathering", "running", "collecting", "over"


@dataclass(frozen=True)
class Refusal:
    """Why a launcher is turned away; ``for_now`` when it may well be taken in later."""

    reason: str
    for_now: bool = False


@dataclass(eq=False)
class Member:
    """One host's launcher, as the coordinator knows it."""

    connection: Connection
    name: str
    ranks: int
    wanted: int | None
    arrived: int
    is_main: bool
    clock: float = 0.0  # what to add to its times to have ours
    ready: bool = False
    stopping: bool = False
    outcome: dict[str, Any] | None = None
    lost: str = ""
    states: dict[int, RankState] = field(default_factory=dict)  # of its ranks, as last told, on our clock

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to wait for from it in this round."""
        return self.outcome is not None or bool(self.lost)


@dataclass
class Membership:
    """The state of the job.

    Attributes:
        hosts: which hosts there are to be.
        max_restarts: how often all ranks are started again after a failure.
        quiet: report the first failure's own words only.
        open_store: binds the listening socket of a round's store and returns its port.
    """

    hosts: Hosts
    max_restarts: int
    quiet: bool
    open_store: Callable[[], int]
    phase: str = GATHERING
    members: list[Member] = field(default_factory=list)
    rounds: int = 0
    restarts: int = 0
    _arrivals: int = 0
    _since: float = field(default_factory=time.monotonic)
    _enough_since: float | None = None
    _told_at: float = field(default_factory=time.monotonic)
    _joined: list[str] = field(default_factory=list)
    _in_round: list[Member] = field(default_factory=list)
    _stragglers: StragglerWatch = field(default_factory=StragglerWatch)
    _compared_at: float = 0.0

    def welcome(self, connection: Connection, hello: dict[str, Any]) -> Refusal | None:
        """A launcher introduces itself. Returns why it is turned away; None when it is taken in."""
        hosts = self.hosts
        if hello["protocol"] != PROTOCOL:
            return Refusal(
                f"it speaks {hello['protocol']!r}, this host {PROTOCOL!r}; use one version on all hosts"
            )
        if hello["job"] != hosts.job:
            return Refusal(f"this is job {hosts.job!r} and not {hello['job']!r} (--rdzv_id)")
        if self.phase == OVER:
            return Refusal("the job is over")
        if hello["hosts"] != [hosts.least, hosts.most]:
            here, there = f"{hosts.least}:{hosts.most}", "{}:{}".format(*hello["hosts"])
            return Refusal(f"the main host has --num_machines {here}, and this one {there}")
        full = self._make_room(hello)
        if full is not None:
            return Refusal(full, for_now=True)
        name, ranks, wanted = hello["name"], hello["ranks"], hello["rank"]
        member = Member(connection, name, ranks, wanted, self._arrivals, hello["main"])
        member.clock = time.monotonic() - hello["now"]
        self._arrivals += 1
        self.members.append(member)
        if self.phase in (RUNNING, COLLECTING):
            self._joined.append(member.name)
            self._collect()
        return None

    def _make_room(self, hello: dict[str, Any]) -> str | None:
        """Let a host that was started again take its silent former self's place. Returns why it cannot."""
        wanted = hello["rank"]
        present = [member for member in self.members if not member.lost]
        for member in present:
            taken = wanted is not None and member.wanted == wanted
            if (taken or member.name == hello["name"]) and member.connection.silent_for() >= _PATIENCE:
                self.lose(member, "it was started again")
            elif taken:
                return f"{member.name} has --machine_rank {wanted} as well"
        if sum(not member.lost for member in present) >= self.hosts.most:
            return f"all {self.hosts.most} hosts are there already"
        return None

    def hear(self, member: Member, message: dict[str, Any]) -> None:
        """A launcher says something."""
        member.clock = min(member.clock, time.monotonic() - message["now"])
        kind = message["kind"]
        if kind == "ready":
            member.ready = True
        elif kind == "ranks":
            states = [RankState.from_json(state).moved(member.clock) for state in message["states"]]
            member.states = {state.rank: state for state in states}
        elif kind == "failed" and self.phase == RUNNING:
            self._collect(but=member)
        elif kind == "outcome":
            member.outcome = message
            is_cause = _may_be_the_cause if self.phase == COLLECTING else _failed
            if message["told"] is not None or any(is_cause(ending) for ending in message["endings"]):
                self._collect(but=member)

    def lose(self, member: Member, why: str) -> None:
        """A host is not there any more."""
        if member.lost:
            return
        member.lost = why
        if member in self._in_round and self.phase in (RUNNING, COLLECTING) and member.outcome is None:
            self._collect()
        elif member not in self._in_round or self.phase == GATHERING:
            self.members.remove(member)

    def look(self) -> None:
        """What time brings: silence, enough hosts, all outcomes there."""
        limit = _PATIENCE if self.phase == COLLECTING else self.hosts.silence
        for member in list(self.members):
            silent = member.connection.silent_for()
            if member.connection.closed:
                self.lose(member, "its launcher ended")
            elif silent > limit and not member.ended:
                self.lose(member, f"nothing was heard of it for {silent:.0f} s")
        if self.phase == GATHERING:
            self._gather()
        elif self.phase == RUNNING:
            self._compare_ranks()
        if self.phase in (RUNNING, COLLECTING) and all(member.ended for member in self._in_round):
            self._conclude()

    def _gather(self) -> None:
        hosts, now = self.hosts, time.monotonic()
        ready = [member for member in self.members if member.ready]
        main_is_there = any(member.is_main for member in ready)
        if len(ready) >= hosts.least and main_is_there:
            self._enough_since = self._enough_since or now
            if len(ready) == hosts.most or now - self._enough_since >= hosts.last_call:
                self._begin(ready)
                return
        else:
            self._enough_since = None
        waited = now - self._since
        if waited > hosts.join_timeout:
            self._end(Verdict(False, 1, _say(f"{self._missing(ready)} within {hosts.join_timeout:.0f} s")))
        elif now - self._told_at >= _TELL:
            self._told_at = now
            text = _say(
                f"waiting for hosts: {self._missing(ready)} ({waited:.0f} s of {hosts.join_timeout:.0f} s)"
            )
            self._broadcast(kind="tell", text=text)

    def _missing(self, ready: Sequence[Member]) -> str:
        here = ", ".join(sorted(member.name for member in ready)) or "none"
        text = f"{len(ready)} of {self.hosts.least} came ({here})"
        ranks = {member.wanted for member in ready}
        if not self.hosts.elastic and None not in ranks and len(ready) < self.hosts.most:
            absent = ", ".join(str(rank) for rank in range(self.hosts.most) if rank not in ranks)
            text += f", machine_rank {absent} is missing"
        return text

    def _begin(self, ready: Sequence[Member]) -> None:
        order = sorted(ready, key=lambda m: (not m.is_main, m.wanted is None, m.wanted, m.arrived))
        try:
            port = self.open_store()
        except OSError as error:
            self._end(Verdict(False, 1, _say(f"no port for the ranks to meet on: {error.strerror}")))
            return
        self._in_round, self._joined, self.phase = list(order), [], RUNNING
        for group_rank, member in enumerate(order):
            member.ready, member.stopping, member.outcome, member.states = False, False, None, {}
            member.connection.send(
                kind="round",
                number=self.rounds,
                group_rank=group_rank,
                local_world_sizes=[other.ranks for other in order],
                port=port,
            )
        self.rounds += 1

    def _compare_ranks(self) -> None:
        """Now and then: who makes the others wait, be it on another host, and whether anybody can get on."""
        now = time.monotonic()
        if now - self._compared_at < _RECORDS_LOOK:
            return
        self._compared_at = now
        states = {rank: state for member in self._in_round for rank, state in member.states.items()}
        all_are_told_of = len(states) == sum(member.ranks for member in self._in_round)
        if not (all_are_told_of and all(now - state.read_at < _FRESH for state in states.values())):
            return
        told = None if self.quiet else self._stragglers.look(states, now)
        if told is not None:
            self._broadcast(kind="tell", text=_say(told))
        if deadlocked(states.values(), now):
            self._broadcast(kind="deadlock")

    def _collect(self, but: Member | None = None) -> None:
        """The round is over: stop the ranks of all hosts (``but`` sees to its own)."""
        if self.phase in (RUNNING, COLLECTING):
            self.phase = COLLECTING
            for member in self._in_round:
                if member is not but and not member.stopping:
                    member.stopping = True
                    member.connection.send(kind="stop")

    def _conclude(self) -> None:
        events = self._events()
        elastic = self.hosts.elastic
        verdict = judge(events, self.restarts, self.max_restarts, elastic=elastic, quiet=self.quiet)
        self.restarts += verdict.counted
        if not verdict.again:
            self._end(verdict)
            return
        for member in self._in_round:  # not to newcomers, who wait for a round
            member.connection.send(kind="verdict", again=True, status=verdict.status, report=verdict.report)
        gone = [m for m in self._in_round if m.lost or (m.outcome or {}).get("told") is not None]
        self.members = [member for member in self.members if member not in gone]
        self.phase, self._in_round, self._enough_since = GATHERING, [], None
        self._since = self._told_at = time.monotonic()

    def _events(self) -> Events:
        told, left = None, []
        for member in self._in_round:
            number = (member.outcome or {}).get("told")
            if number is not None:
                rest = sum(not m.lost and (m.outcome or {}).get("told") is None for m in self._in_round)
                if self.hosts.elastic and not member.is_main and rest >= self.hosts.least:
                    left.append(member.name)
                else:
                    told = (member.name, number)
        told_of = [(m, fields) for m in self._in_round if m.outcome for fields in m.outcome["endings"]]
        endings = [_ending(member, fields) for member, fields in told_of]
        lost = [f"{m.name}: {m.lost}" for m in self._in_round if m.lost and m.outcome is None]
        return Events(endings, lost, told, left, self._joined)

    def _end(self, verdict: Verdict) -> None:
        self.phase = OVER
        self._broadcast(kind="verdict", again=False, status=verdict.status, report=verdict.report)

    def _broadcast(self, **message: Any) -> None:
        for member in self.members:
            if not member.lost:
                member.connection.send(**message)


class Coordinator:
    """Serves a job in a thread of its own, until ``close``.

    Args:
        hosts, max_restarts, quiet: see ``Membership``.

    Raises:
        OSError: the port cannot be had.
    """

    def __init__(self, hosts: Hosts, max_restarts: int, *, quiet: bool) -> None:
        self._listener = _listen(hosts.port)
        self._membership = Membership(hosts, max_restarts, quiet, self._open_store)
        self._store: socket.socket | None = None
        self._strangers: dict[Connection, float] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="paceline-coordinator", daemon=True)
        self._thread.start()

    def take_store(self) -> socket.socket:
        """The listening socket of the store of the round that was just begun."""
        store, self._store = self._store, None
        if store is None:
            raise LaunchError("the main host has no store for this round; start the job again")
        return store

    def close(self) -> None:
        """Stop serving once all launchers have fetched the verdict and hung up, or had the time to."""
        deadline = time.monotonic() + _LAST_WORDS
        while self._membership.phase == OVER and time.monotonic() < deadline:
            if all(member.lost or member.connection.closed for member in list(self._membership.members)):
                break
            time.sleep(0.02)
        self._closing.set()
        self._thread.join()

    def _open_store(self) -> int:
        if self._store is not None:
            self._store.close()
        self._store = _listen(0)
        return int(self._store.getsockname()[1])

    def _serve(self) -> None:
        beat_at = 0.0
        while not self._closing.is_set():
            members = self._membership.members
            by_connection = {m.connection: m for m in members if not m.connection.closed}
            sources: list[Any] = [self._listener, *by_connection, *self._strangers]
            ready, _, _ = select.select(sources, [], [], _LOOK)
            for source in ready:
                if source is self._listener:
                    self._accept()
                elif source in by_connection:
                    for message in source.receive():
                        self._membership.hear(by_connection[source], message)
                else:
                    self._introduce(source)
            self._turn_away_the_mute()
            self._membership.look()
            if time.monotonic() - beat_at > BEAT:
                beat_at = time.monotonic()
                for member in self._membership.members:
                    member.connection.send(kind="alive")
        for connection in [*self._strangers, *(m.connection for m in self._membership.members)]:
            connection.close()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            self._strangers[Connection(sock)] = time.monotonic()

    def _introduce(self, connection: Connection) -> None:
        messages = connection.receive()
        if not messages:
            return
        del self._strangers[connection]
        try:
            refusal = self._membership.welcome(connection, messages[0])
        except (KeyError, TypeError, ValueError):
            connection.close()  # somebody else's protocol
            return
        answer = None if refusal is None else {"reason": refusal.reason, "for_now": refusal.for_now}
        connection.send(kind="welcome", protocol=PROTOCOL, refusal=answer)
        if refusal is not None:
            connection.close()
            return
        member = self._membership.members[-1]
        for message in messages[1:]:
            self._membership.hear(member, message)

    def _turn_away_the_mute(self) -> None:
        for connection, since in list(self._strangers.items()):
            if connection.closed or time.monotonic() - since > _GREETING:
                del self._strangers[connection]
                connection.close()


def _listen(port: int) -> socket.socket:
    """A listening socket on all of this host's addresses."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def _ending(member: Member, fields: dict[str, Any]) -> Ending:
    """A rank's ending as its host told it, with its times on our clock."""
    at, state = fields["traceback_at"], fields.get("state")
    moved = {
        "host": member.name,
        "ended_at": fields["ended_at"] + member.clock,
        "traceback_at": None if at is None else at + member.clock,
        "looked_at": fields.get("looked_at", 0.0) + member.clock,
        "state": None if state is None else RankState.from_json(state).moved(member.clock),
    }
    return Ending(**{**fields, **moved})


def _failed(fields: dict[str, Any]) -> bool:
    return fields["exit_code"] != 0 and not fields["stopped"]


def _may_be_the_cause(fields: dict[str, Any]) -> bool:
    """Failed, left, or was found stopped: whatever others have waited for in vain."""
    return fields["frozen"] or not fields["stopped"]


def _say(text: str) -> str:
    return f"paceline launch: {text}\n"
