"""The stories of a job of several hosts, told to the state that decides, without sockets or ranks."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.launch.config import Hosts
from paceline.launch.coordinator import GATHERING, OVER, RUNNING, Membership, Refusal
from paceline.launch.wire import PROTOCOL
from paceline.recorder.reading import RankState


class FakeConnection:
    """Remembers what it was told, and can fall silent or close."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.silence = 0.0
        self.closed = False

    def send(self, **message: Any) -> None:
        self.told.append(message)

    def silent_for(self) -> float:
        return self.silence

    def last(self, kind: str) -> dict[str, Any]:
        return [message for message in self.told if message["kind"] == kind][-1]

    def heard(self, kind: str) -> int:
        return sum(message["kind"] == kind for message in self.told)


class Job:
    """A membership, and shorthands for what its launchers say."""

    def __init__(self, least: int = 2, most: int = 2, max_restarts: int = 0, **settings: Any) -> None:
        hosts = Hosts(least, most, address="h0", port=1, **{"last_call": 0.0, **settings})
        self.state = Membership(hosts, max_restarts, quiet=False, open_store=lambda: 4000 + self.state.rounds)

    def hello(self, name: str, rank: int | None = None, **changes: Any) -> tuple[Any, Refusal | None]:
        connection: Any = FakeConnection()
        hosts = self.state.hosts
        words = {"protocol": PROTOCOL, "job": "none", "hosts": [hosts.least, hosts.most], "rank": rank}
        words |= {"name": name, "ranks": 2, "main": name == "h0", "now": time.monotonic(), **changes}
        return connection, self.state.welcome(connection, words)

    def join(self, name: str, rank: int | None = None) -> Any:
        connection, refusal = self.hello(name, rank)
        assert refusal is None
        self.say(connection, "ready")
        return connection

    def say(self, connection: Any, kind: str, **words: Any) -> None:
        member = next(m for m in self.state.members if m.connection is connection)
        self.state.hear(member, {"kind": kind, "now": time.monotonic(), **words})

    def outcome(self, connection: Any, *endings: dict[str, Any], told: int | None = None) -> None:
        self.say(connection, "outcome", endings=list(endings), told=told)
        self.state.look()


def ending(rank: int, exit_code: int = 0, stderr: str = "", stopped: bool = False) -> dict[str, Any]:
    now = time.monotonic()
    return {"rank": rank, "pid": 100 + rank, "exit_code": exit_code, "ended_at": now, "stopped": stopped,
            "stderr": stderr, "traceback_at": now if stderr else None, "error_file": None, "log": None,
            "frozen": False, "host": ""}  # fmt: skip


BOOM = 'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: boom\n'
LOST = 'Traceback (most recent call last):\n  File "x.py", line 1\nRuntimeError: Connection closed by peer\n'


def started(job: Job, *names: str) -> list[Any]:
    connections = [job.join(name) for name in names]
    job.state.look()
    assert job.state.phase == RUNNING
    return connections


def test_ranks_count_through_the_hosts_the_main_one_first() -> None:
    job = Job()
    h1, h0 = job.join("h1", rank=1), job.join("h0", rank=0)
    job.state.look()
    assert h0.last("round") == {
        "kind": "round", "number": 0, "group_rank": 0, "local_world_sizes": [2, 2], "port": 4000
    }  # fmt: skip
    assert h1.last("round")["group_rank"] == 1


def test_all_hosts_end_well() -> None:
    job = Job()
    h0, h1 = started(job, "h0", "h1")
    job.outcome(h0, ending(0), ending(1))
    assert job.state.phase == RUNNING and h1.heard("stop") == 0
    job.outcome(h1, ending(2), ending(3))
    assert job.state.phase == OVER
    job.state.look()
    assert h0.heard("verdict") == h1.heard("verdict") == 1
    assert h0.last("verdict") == h1.last("verdict")
    assert (h0.last("verdict")["status"], h0.last("verdict")["report"]) == (0, "")


def test_a_failure_stops_the_others_and_all_get_the_same_report() -> None:
    job = Job()
    h0, h1 = started(job, "h0", "h1")
    job.say(h1, "failed")
    assert (h0.heard("stop"), h1.heard("stop")) == (1, 0)  # h1 may wait for the cause of its failure
    job.outcome(h0, ending(0, 1, LOST), ending(1, -15, stopped=True))
    assert (h0.heard("stop"), h1.heard("stop")) == (1, 1)
    assert h0.heard("verdict") == 0
    job.outcome(h1, ending(2, 3, BOOM), ending(3))
    for host in (h0, h1):
        verdict = host.last("verdict")
        assert (verdict["again"], verdict["status"]) == (False, 3)
        assert "rank 2 on h1 failed first (exit code 3, pid 102)" in verdict["report"]
        assert verdict["report"].endswith("[rank2]: ValueError: boom\n")


def test_restarts_are_counted_for_the_whole_job() -> None:
    job = Job(max_restarts=1)
    h0, h1 = started(job, "h0", "h1")
    job.outcome(h1, ending(2, 1, BOOM))
    job.outcome(h0, ending(0, -15, stopped=True))
    assert h0.last("verdict")["again"] and "attempt 2 of 2" in h0.last("verdict")["report"]
    for host in (h0, h1):
        job.say(host, "ready")
    job.state.look()
    assert h1.last("round")["number"] == 1 and h1.last("round")["port"] != h0.told[0].get("port")
    job.outcome(h0, ending(0, 1, BOOM))
    job.outcome(h1, ending(2, -15, stopped=True))
    assert not h0.last("verdict")["again"]


def test_a_silent_host_is_lost_late_alone_and_soon_when_others_failed() -> None:
    job = Job(silence=30.0)
    h0, h1 = started(job, "h0", "h1")
    h1.silence = 20.0
    job.state.look()
    assert job.state.phase == RUNNING
    job.outcome(h0, ending(0, 1, LOST))
    job.state.look()
    verdict = h0.last("verdict")
    assert not verdict["again"] and verdict["status"] == 1
    assert "lost a host: h1: nothing was heard of it for 20 s" in verdict["report"]
    for cause in ({"exit_code": 0}, {"exit_code": -9, "stopped": True, "frozen": True}):
        job = Job()
        h0, h1 = started(job, "h0", "h1")
        job.say(h0, "failed")
        job.outcome(h1, ending(2) | cause, ending(3, -15, stopped=True))
        assert h0.heard("stop") == 1
    job = Job()
    h0, h1 = started(job, "h0", "h1")
    job.say(h0, "failed")
    job.outcome(h1, ending(2, -15, stopped=True), ending(3, -15, stopped=True))
    assert h0.heard("stop") == 0  # the cause is yet to be seen, on h0
    job = Job(silence=30.0)
    h0, h1 = started(job, "h0", "h1")
    job.say(h0, "failed")
    h1.silence = 20.0
    job.state.look()
    assert h0.heard("stop") == 1  # there is nothing to learn from h1
    job = Job(silence=30.0)
    h0, h1 = started(job, "h0", "h1")
    h1.silence = 31.0
    job.state.look()
    assert h0.heard("stop") == 1


def test_a_lost_host_is_waited_for_and_taken_in_again() -> None:
    job = Job(max_restarts=1)
    h0, h1 = started(job, "h0", "h1")
    h1.closed = True
    job.state.look()
    job.outcome(h0, ending(0, -15, stopped=True))
    assert "lost a host: h1: its launcher ended" in h0.last("verdict")["report"]
    job.say(h0, "ready")
    job.state.look()
    assert job.state.phase == GATHERING
    again = job.join("h1")
    job.state.look()
    assert again.last("round")["number"] == 1


def test_an_elastic_job_goes_on_without_a_host_and_takes_newcomers_in() -> None:
    job = Job(least=1, most=3)
    h0, h1 = [job.join(name) for name in ("h0", "h1")]
    job.state.look()
    assert h0.last("round")["local_world_sizes"] == [2, 2]
    h1.closed = True
    job.state.look()
    job.outcome(h0, ending(0, 1, LOST))
    job.state.look()
    assert h0.last("verdict")["again"]
    job.say(h0, "ready")
    job.state.look()
    assert h0.last("round")["local_world_sizes"] == [2]
    h2 = job.join("h2")
    assert h0.last("stop")
    job.outcome(h0, ending(0, -15, stopped=True))
    assert h0.last("verdict")["again"] and "host h2 has joined" in h0.last("verdict")["report"]
    assert h2.heard("verdict") == 0
    job.say(h0, "ready")
    job.state.look()
    assert h2.last("round")["local_world_sizes"] == [2, 2]
    assert job.state.restarts == 0


def test_a_host_that_is_told_to_end_leaves_an_elastic_job_and_ends_another() -> None:
    for least, again in ((1, True), (2, False)):
        job = Job(least=least, most=2)
        h0, h1 = started(job, "h0", "h1")
        job.outcome(h1, ending(2, -15, stopped=True), told=signal.SIGTERM)
        job.outcome(h0, ending(0, -15, stopped=True))
        assert h0.last("verdict")["again"] == again
        if not again:
            assert h0.last("verdict")["status"] == 143
            assert "ended by SIGTERM (on h1)" in h0.last("verdict")["report"]


def test_hosts_that_are_waited_for_are_named() -> None:
    job = Job(most=3, least=3)
    h2 = job.join("h2", rank=2)
    job.state._told_at -= 6
    job.state.look()
    assert "waiting for hosts: 1 of 3 came (h2), machine_rank 0, 1 is missing" in h2.last("tell")["text"]
    job.state._since -= 601
    job.state.look()
    assert h2.last("verdict")["status"] == 1 and "1 of 3 came" in h2.last("verdict")["report"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"protocol": "paceline-launch-9"}, "use one version on all hosts"),
        ({"job": "other"}, "this is job 'none' and not 'other'"),
        ({"hosts": [4, 4]}, "--num_machines 2:2, and this one 4:4"),
        ({"rank": 0}, "h0 has --machine_rank 0 as well"),
    ],
)
def test_who_does_not_belong_is_turned_away(changes: dict[str, Any], text: str) -> None:
    job = Job()
    job.join("h0", rank=0)
    _, refusal = job.hello("h1", **{"rank": 1, **changes})
    assert refusal is not None and text in refusal.reason
    assert refusal.for_now == ("rank" in changes)


def test_a_full_job_takes_nobody_in_but_a_host_that_was_started_again() -> None:
    job = Job()
    connections = started(job, "h0", "h1")
    _, refusal = job.hello("h2")
    assert refusal == Refusal("all 2 hosts are there already", for_now=True)
    connections[1].silence = 4.0
    _, refusal = job.hello("h1")
    assert refusal is None
    assert connections[0].heard("stop") == 1


def tell_ranks(job: Job, host: Any, waited: dict[int, float], now: float, ahead: float) -> None:
    """A host, whose clock is ahead, says how long its ranks have waited, as read a moment ago."""
    read_at = now + ahead - 0.2
    states = [
        RankState(rank, read_at=read_at, waited_s=seconds, passes=int(now), line="train.py:41", stands=True)
        for rank, seconds in waited.items()
    ]
    job.say(host, "ranks", states=[vars(state) for state in states], now=now + ahead)


def test_a_slow_rank_is_told_on_all_hosts_while_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    job, clock = Job(silence=1e9), SimpleNamespace(now=time.monotonic())
    h0, h1 = started(job, "h0", "h1")
    monkeypatch.setattr("paceline.launch.coordinator.time", SimpleNamespace(monotonic=lambda: clock.now))
    for second in range(30):
        clock.now += 1.0
        if second % 2:  # each host reads every two seconds, and not at the same moment
            tell_ranks(job, h0, {0: 0.6 * second, 1: 0.5 * second}, clock.now, ahead=0.0)
        else:
            tell_ranks(job, h1, {2: 0.5 * second, 3: 0.02 * second}, clock.now, ahead=1000.0)
        job.state.look()
    for host in (h0, h1):
        assert host.heard("tell") == 1
        assert "rank 3 is slower than the others, who waited for it 4" in host.last("tell")["text"]


def test_nothing_is_told_of_ranks_of_which_one_host_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    job, clock = Job(silence=1e9), SimpleNamespace(now=time.monotonic())
    h0, h1 = started(job, "h0", "h1")
    monkeypatch.setattr("paceline.launch.coordinator.time", SimpleNamespace(monotonic=lambda: clock.now))
    for second in range(60):
        clock.now += 1.0
        tell_ranks(job, h0, {0: 0.6 * second, 1: 0.0}, clock.now, ahead=0.0)
        if second < 10:
            tell_ranks(job, h1, {2: 0.6 * second}, clock.now, ahead=0.0)
        job.state.look()
    assert h0.heard("tell") == h1.heard("tell") == 0


def test_ranks_that_wait_for_each_other_are_ended_on_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    job, clock = Job(silence=1e9), SimpleNamespace(now=time.monotonic())
    h0, h1 = started(job, "h0", "h1")
    monkeypatch.setattr("paceline.launch.coordinator.time", SimpleNamespace(monotonic=lambda: clock.now))
    began = clock.now
    for _ in range(10):
        clock.now += 2.0
        for host, ranks, ahead in ((h0, (0, 1), 0.0), (h1, (2, 3), 1000.0)):
            states = [
                RankState(rank, read_at=clock.now + ahead, seen=clock.now + ahead, stands=True, patience=9.0,
                          waits_for="a collective (barrier)", still_since=began + ahead,
                          group="1" if rank < 3 else "2", members=(0, 1, 2, 3))
                for rank in ranks
            ]  # fmt: skip
            job.say(host, "ranks", states=[vars(state) for state in states], now=clock.now + ahead)
        job.state.look()
        assert h0.heard("deadlock") == h1.heard("deadlock")
        assert bool(h1.heard("deadlock")) == (clock.now - began > 9.0)
