"""This host's part in a job of several hosts: a connection to the coordinator on the main host."""

from __future__ import annotations

import dataclasses
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from queue import Empty, SimpleQueue
from typing import Any

from paceline.errors import LaunchError
from paceline.launch.config import Hosts
from paceline.launch.coordinator import Coordinator
from paceline.launch.interrupted import Interrupted
from paceline.launch.job import Events, Job, Outcome, Round, Verdict, judge
from paceline.launch.wire import BEAT, PROTOCOL, Connection, interface_of, is_ours
from paceline.recorder.reading import RankState

_ANSWER = 5.0  # seconds until a main host that answers at all has said who it is
_ATTEMPT = 2.0  # seconds for one try to connect
_TELL = 5.0  # seconds between two lines about what is waited for
_PATIENCE = 4.0  # seconds of silence after which a main host cannot be asked what follows
_STRANGERS = 3  # answers that are not a launcher's before we believe it
_STDERR_SENT = 20_000  # characters of each rank's stderr that the report may need


class HostsJob(Job):
    """The job of several hosts, as the launcher of one of them takes part in it (see ``job.Job``).

    Args:
        hosts: which hosts there are to be, and where they meet.
        ranks: number of ranks of this host.
        max_restarts: how often all ranks are started again; the main host's word counts.
        quiet: report the first failure's own words only; the main host's word counts.
        told_to_end: asked while waiting, for the signal that told the launcher to end, if one did;
            until the ranks have run it raises ``Interrupted`` there.
        say: shows a line.

    Raises:
        LaunchError: this is the main host, and its port cannot be had.
    """

    def __init__(
        self,
        hosts: Hosts,
        ranks: int,
        max_restarts: int,
        *,
        quiet: bool,
        told_to_end: Callable[[], int | None],
        say: Callable[[str], None],
    ) -> None:
        self._hosts, self._ranks, self._quiet = hosts, ranks, quiet
        self._max_restarts = max_restarts
        self._told_to_end, self._say = told_to_end, say
        self._name = f"{socket.gethostname()}"
        self._coordinator = self._coordinate(max_restarts)
        self._link: _Link | None = None
        self._failed = False

    def next_round(self) -> Round:
        link = self._link
        if link is None:
            link = self._link = self._connect()
        self._failed = False
        link.connection.send(kind="ready")
        message = self._wait_for(link, "round", "verdict")
        if message["kind"] == "verdict":  # not enough hosts came
            reason = message["report"].removeprefix("paceline launch: ").rstrip()
            raise LaunchError(reason or "the job ended while this host waited to take part")
        here = self._hosts.local_address or link.connection.address().removeprefix("::ffff:")
        main = message["group_rank"] == 0 and self._coordinator is not None
        return Round(
            number=message["number"],
            group_rank=message["group_rank"],
            local_world_sizes=tuple(message["local_world_sizes"]),
            master_addr=str(self._hosts.address),
            master_port=message["port"],
            listener=self._coordinator.take_store() if main and self._coordinator else None,
            interface=interface_of(here),
        )

    def look(self, states: Mapping[int, RankState], now: float) -> str:
        assert self._link is not None
        if self._link.connection.silent_for() < _PATIENCE:  # else nobody may read it
            self._link.connection.send(kind="ranks", states=[vars(state) for state in states.values()])
        return "".join(news["text"] for news in self._link.take_all("tell"))

    def deadlocked(self, states: Mapping[int, RankState], now: float) -> bool:
        assert self._link is not None
        return self._link.deadlock.is_set()  # the main host compares the ranks of all

    def stop_requested(self) -> bool:
        assert self._link is not None
        patience = _PATIENCE if self._failed else self._hosts.silence
        return self._link.stop.is_set() or self._link.lost(patience)

    def announce_failure(self) -> None:
        assert self._link is not None
        self._failed = True
        self._link.connection.send(kind="failed")

    def settle(self, outcome: Outcome) -> Verdict:
        link = self._link
        assert link is not None
        endings = [_fields(ending) for ending in outcome.endings]
        link.connection.send(kind="outcome", told=outcome.told, endings=endings)
        clean = outcome.told is None and not any(ending.failed for ending in outcome.endings)
        patience = self._hosts.silence if clean and not link.stop.is_set() else _PATIENCE
        while not link.lost(patience):
            message = link.take("verdict")
            if message is not None:
                left = 128 + outcome.told if outcome.told is not None else 0
                again = message["again"] and outcome.told is None
                return Verdict(again, message["status"] or left, message["report"])
            if outcome.told is None and (told := self._told_to_end()) is not None:
                outcome = Outcome(outcome.endings, told)
                link.connection.send(kind="outcome", told=told, endings=endings)
            time.sleep(0.05)
        return self._settle_alone(link, outcome)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._coordinator is not None:
            self._coordinator.close()

    def _settle_alone(self, link: _Link, outcome: Outcome) -> Verdict:
        """What follows when the main host cannot be asked."""
        ended, silent = link.connection.closed, link.connection.silent_for()
        why = "its launcher ended" if ended else f"nothing was heard of it for {silent:.0f} s"
        lost = f"the main host {self._hosts.address}: {why}"
        endings = [dataclasses.replace(ending, host=self._name) for ending in outcome.endings]
        told = (self._name, outcome.told) if outcome.told is not None else None
        # A silent host may come back when the network does; an ended launcher will not.
        rejoin = not ended and (self._hosts.elastic or self._max_restarts > 0) and told is None
        self._link = None
        link.close()
        verdict = judge(Events(endings, [lost], told), 0, 1 if rejoin else 0, quiet=self._quiet)
        return dataclasses.replace(verdict, again=rejoin and verdict.again, status=verdict.status or 1)

    def _coordinate(self, max_restarts: int) -> Coordinator | None:
        """Open the meeting place, if this is the main host."""
        hosts = self._hosts
        assert hosts.address is not None
        first = hosts.rank == 0 if hosts.rank is not None else None
        named = hosts.is_main if hosts.is_main is not None else first
        if not (is_ours(hosts.address) if named is None else named):
            return None
        try:
            return Coordinator(hosts, max_restarts, quiet=self._quiet)
        except OSError as error:
            if named is None:
                return None  # another launcher of this host was first
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise LaunchError(
                f"port {hosts.port} of this host, where the launchers are to meet, cannot be used: {reason}; "
                f"name another with --main_process_port on all hosts"
            ) from None

    def _connect(self) -> _Link:
        """Reach the main host, however long it takes to be there and to take us in."""
        hosts, began, told_at, strangers = self._hosts, time.monotonic(), time.monotonic(), 0
        where = f"{hosts.address}:{hosts.port}"
        while True:
            try:
                sock = socket.create_connection((hosts.address, hosts.port), timeout=_ATTEMPT)
                answer = self._introduce(Connection(sock))
                if isinstance(answer, _Link):
                    return answer
                strangers += answer is None
                reason = answer or "something answers there that is no paceline launcher"
            except OSError as error:
                reason = error.strerror or str(error)
            if strangers >= _STRANGERS:
                raise LaunchError(f"{where}: {reason}; name another port on all hosts (--main_process_port)")
            waited, limit = time.monotonic() - began, f"{hosts.join_timeout:.0f} s"
            if waited > hosts.join_timeout:
                raise LaunchError(f"the main host {where} was not there within {limit}: {reason}")
            if time.monotonic() - told_at > _TELL:
                told_at = time.monotonic()
                wait = f"{waited:.0f} s of {limit}"
                self._say(f"paceline launch: waiting for the main host {where} ({wait}): {reason}\n")
            self._pause(0.5)

    def _introduce(self, connection: Connection) -> _Link | str | None:
        """Say who we are.

        Returns:
            The link when we are taken in, why not when we are turned away for now, and None when nobody
            answers who knows our words.

        Raises:
            LaunchError: we are turned away for good.
        """
        hosts = self._hosts
        connection.send(
            kind="hello",
            protocol=PROTOCOL,
            job=hosts.job,
            hosts=[hosts.least, hosts.most],
            rank=hosts.rank,
            name=self._name,
            ranks=self._ranks,
            main=self._coordinator is not None,
        )
        link = _Link(connection)
        deadline = time.monotonic() + _ANSWER
        while (welcome := link.take("welcome")) is None and not link.lost(_ANSWER):
            if time.monotonic() > deadline:
                break
            self._pause(0.02)
        if welcome is not None and not welcome["refusal"]:
            return link
        link.close()
        if welcome is None:
            return None
        reason = str(welcome["refusal"]["reason"])
        if not welcome["refusal"]["for_now"]:
            raise LaunchError(f"turned away by the main host {hosts.address}: {reason}")
        return reason

    def _wait_for(self, link: _Link, *kinds: str) -> dict[str, Any]:
        while not link.lost(self._hosts.silence):
            for kind in kinds:
                message = link.take(kind)
                if message is not None:
                    return message
            for news in link.take_all("tell"):
                self._say(news["text"])
            self._pause(0.02)
        raise LaunchError(f"lost the main host {self._hosts.address} while waiting for the other hosts")

    def _pause(self, seconds: float) -> None:
        if self._told_to_end() is not None:
            raise Interrupted
        time.sleep(seconds)


class _Link:
    """A connection that a thread listens to, and gives signs of life on."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.stop, self.deadlock = threading.Event(), threading.Event()
        self._news: dict[str, SimpleQueue[dict[str, Any]]] = {
            kind: SimpleQueue() for kind in ("welcome", "round", "verdict", "tell")
        }
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="paceline-member", daemon=True)
        self._thread.start()

    def take(self, kind: str) -> dict[str, Any] | None:
        """The next message of a kind, if there is one."""
        try:
            return self._news[kind].get_nowait()
        except Empty:
            return None

    def take_all(self, kind: str) -> Iterator[dict[str, Any]]:
        """All messages of a kind that are there."""
        while (message := self.take(kind)) is not None:
            yield message

    def lost(self, patience: float) -> bool:
        """Whether the main host is gone, or was silent for longer than ``patience`` seconds."""
        undelivered = any(not queue.empty() for queue in self._news.values())
        return not undelivered and (self.connection.closed or self.connection.silent_for() > patience)

    def close(self) -> None:
        """Hang up."""
        self._closing.set()
        self._thread.join()
        self.connection.close()

    def _listen(self) -> None:
        beat_at = time.monotonic()
        while not self._closing.is_set() and not self.connection.closed:
            ready, _, _ = select.select([self.connection], [], [], 0.1)
            for message in self.connection.receive() if ready else []:
                if message["kind"] == "stop":
                    self.stop.set()
                elif message["kind"] == "deadlock":
                    self.deadlock.set()
                elif message["kind"] in self._news:
                    if message["kind"] == "round":
                        self.stop.clear()
                        self.deadlock.clear()
                    self._news[message["kind"]].put(message)
            if time.monotonic() - beat_at > BEAT:
                beat_at = time.monotonic()
                self.connection.send(kind="alive")


def _fields(ending: Any) -> dict[str, Any]:
    fields = dataclasses.asdict(ending)
    return {**fields, "stderr": ending.stderr[-_STDERR_SENT:]}
