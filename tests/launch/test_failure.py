"""The report: which failure is the first, and that its own words come last."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.launch.coordinator import _ending
from paceline.launch.failure import (
    Ending,
    describe,
    exit_status,
    first_failure,
    last_traceback,
    only_lost_peers,
)
from paceline.launch.job import Events, judge
from paceline.launch.member import _fields
from paceline.recorder.reading import RankState


def traceback(exception: str) -> str:
    frames = '  File "train.py", line 3, in <module>\n    step()\n'
    return f"Traceback (most recent call last):\n{frames}{exception}\n"


LOST = traceback("RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:3700")


def ending(rank: int, exit_code: int, at: float, stderr: str = "", **more: Any) -> Ending:
    seen = at - 0.5 if "Traceback" in stderr else None
    return Ending(rank=rank, pid=100 + rank, exit_code=exit_code, ended_at=at, stderr=stderr,
                  **{"traceback_at": seen, **more})  # fmt: skip


def last_lines(endings: list[Ending], number: int) -> list[str]:
    return describe(endings, attempt=0, max_restarts=0).splitlines()[-number:]


def test_the_traceback_of_the_first_failure_is_last() -> None:
    endings = [ending(0, 1, 10.2, LOST), ending(1, 1, 11.0, traceback("ValueError: boom"), traceback_at=9.0)]
    assert first_failure(endings).rank == 1
    assert last_lines(endings, 4) == [
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "train.py", line 3, in <module>',
        "[rank1]:     step()",
        "[rank1]: ValueError: boom",
    ]


def test_consequences_get_a_line_each() -> None:
    endings = [
        ending(0, 1, 10.2, LOST),
        ending(1, 1, 9.0, traceback("ValueError: boom")),
        ending(2, -15, 11.0, stopped=True),
        ending(3, -15, 11.0, LOST, stopped=True),
        ending(4, 0, 7.0),
        ending(5, -9, 13.0, stopped=True),
    ]
    report = describe(endings, attempt=1, max_restarts=2).splitlines()
    assert report[0] == "paceline launch: rank 1 failed first (exit code 1, pid 101, attempt 2 of 3)"
    assert report[1].startswith("paceline launch: rank 0 failed after it (exit code 1): RuntimeError: [pair")
    assert report[2] == "paceline launch: rank 2 was stopped by the launcher"
    assert "rank 3 was stopped by the launcher, already failing with RuntimeError: [pair" in report[3]
    assert report[4] == "paceline launch: rank 4 had finished (exit code 0, 1.5 s earlier)"
    assert (
        report[5]
        == "paceline launch: rank 5 was stopped by the launcher with SIGKILL, for it did not end on SIGTERM"
    )


def test_a_lost_peer_is_no_cause_even_when_it_was_seen_first() -> None:
    endings = [ending(0, 1, 5.0, LOST), ending(1, -9, 9.0)]
    assert first_failure(endings).rank == 1
    assert exit_status(first_failure(endings)) == 137


def test_a_lost_peer_is_the_cause_when_nothing_else_is_known() -> None:
    endings = [ending(0, 1, 6.0, LOST), ending(1, 1, 5.0, LOST), ending(2, -15, 7.0, stopped=True)]
    assert only_lost_peers(endings)
    assert first_failure(endings).rank == 1


def test_the_cause_may_have_been_stopped_while_it_shut_down() -> None:
    boom = traceback("ValueError: boom")
    endings = [ending(0, 1, 6.0, LOST), ending(1, -15, 8.0, boom, stopped=True, traceback_at=5.4)]
    assert first_failure(endings).rank == 1
    assert last_lines(endings, 1) == ["[rank1]: ValueError: boom"]
    assert exit_status(first_failure(endings)) == 1


def test_a_logged_exception_of_a_stopped_rank_is_no_cause() -> None:
    logged = traceback("ValueError: tried again")
    for rank_1 in (
        ending(1, -15, 98.0, logged + "going on\n", stopped=True, traceback_at=95.4),
        ending(1, -15, 98.0, logged, stopped=True, traceback_at=4.0),
    ):
        assert first_failure([ending(0, 1, 96.0, LOST), rank_1]).rank == 0


def test_killed_by_a_signal() -> None:
    endings = [ending(0, -15, 5.0, stopped=True), ending(1, -9, 4.0, "some warning\n")]
    assert last_lines(endings, 1)[0].startswith("paceline launch: rank 1 was killed by SIGKILL: ")
    crashed = [ending(0, -11, 4.0, "Fatal Python error: Segmentation fault\n")]
    assert last_lines(crashed, 2)[0] == "[rank0]: Fatal Python error: Segmentation fault"
    assert "SIGSEGV" in last_lines(crashed, 1)[0]


def test_an_abort_while_shutting_down_after_an_exception_is_that_exception() -> None:
    said = traceback("ValueError: boom") + "terminate called without an active exception\n"
    endings = [ending(0, -6, 5.0, said)]
    assert last_lines(endings, 1) == ["[rank0]: ValueError: boom"]
    assert exit_status(first_failure(endings)) == 1


def test_without_traceback_the_last_words_are_shown() -> None:
    said = '  File "job.py", line 1\n    def\n       ^\nSyntaxError: invalid syntax\n'
    assert last_lines([ending(0, 1, 4.0, said)], 1) == ["[rank0]: SyntaxError: invalid syntax"]
    assert "wrote nothing to stderr before it ended with exit code 3" in last_lines([ending(0, 3, 4.0)], 1)[0]


def test_an_exception_recorded_by_torch_elastic_is_used() -> None:
    recorded = json.dumps(
        {"message": {"message": "x", "extraInfo": {"py_callstack": traceback("KeyError: 'a'")}}}
    )
    assert last_lines([ending(0, 1, 4.0, error_file=recorded)], 1) == ["[rank0]: KeyError: 'a'"]


@pytest.mark.parametrize("link", [
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
])  # fmt: skip
def test_chained_exceptions_stay_together(link: str) -> None:
    old, chain = (
        traceback("OSError: logged before"),
        traceback("KeyError: 1") + f"\n{link}\n\n" + traceback("E: 2"),
    )
    assert last_traceback(old + "going on\n" + chain) == chain.rstrip()


def test_the_ranks_own_prefix_and_later_noise_are_left_out() -> None:
    text = "".join(f"[rank1]: {line}\n" for line in traceback("ValueError: boom").splitlines())
    noise = "[rank1]:[W1129 18:07:06.290 ProcessGroupNCCL.cpp:1] Warning: destroy_process_group() ...\n"
    assert last_traceback("epoch 1\n" + text + noise) == traceback("ValueError: boom").rstrip()


TIMED_OUT = traceback("paceline.errors.CollectiveTimeoutError: rank 0: bucket 1 failed, because rank 1 ...")
WAITS = RankState(0, waits_for="bucket 1 of 1 (w)", waits_since=60.0, waits_until=90.0, wait_failed=True)
LOADS = RankState(
    1, seen=99.9, line="train.py:41", line_since=59.0, doing="data loading", asleep=True, stands=True
)


def hang(**of_rank_1: Any) -> list[Ending]:
    seen = {"looked_at": 100.0}
    return [
        ending(0, 1, 100.0, TIMED_OUT, state=WAITS, **seen),
        ending(1, -15, 102.0, stopped=True, state=LOADS, **seen, **of_rank_1),
    ]


def test_who_was_waited_for_is_the_cause_and_the_last_word() -> None:
    assert first_failure(hang()).rank == 1
    assert exit_status(first_failure(hang())) == 1
    report = describe(hang(), attempt=0, max_restarts=0).splitlines()
    assert report[0] == "paceline launch: rank 1 held up the others (alive, pid 101)"
    assert report[1].startswith("paceline launch: rank 0 failed after it (exit code 1): paceline.errors.Coll")
    assert report[2].startswith(
        "paceline launch: rank 1 held up the others: it was asleep in data loading for 41 s at train.py:41. "
        "Rank 0 had waited 30 s for bucket 1 of 1 (w). "
    )
    assert describe(hang(), attempt=0, max_restarts=0, quiet=True).splitlines() == report[2:]


def test_a_stopped_rank_is_told_with_who_waited_for_it() -> None:
    report = describe(hang(frozen=True), attempt=0, max_restarts=0).splitlines()
    assert "Rank 0 had waited 30 s for bucket 1 of 1 (w)." in report[-2]
    assert "rank 1 was stopped (SIGSTOP" in report[-1]


def test_an_exception_outweighs_what_the_records_tell() -> None:
    endings = hang()
    endings[1] = ending(1, 1, 99.0, traceback("ValueError: boom"), state=LOADS, looked_at=100.0)
    assert last_lines(endings, 1) == ["[rank1]: ValueError: boom"]


def test_a_rank_that_only_computed_when_a_connection_broke_is_not_blamed() -> None:
    busy = RankState(1, seen=100.0, phase="backward pass 7", waits_since=99.0)
    endings = [
        ending(0, 1, 100.0, LOST, state=WAITS, looked_at=100.0),
        ending(1, -15, 102.0, stopped=True, state=busy, looked_at=100.0),
    ]
    assert first_failure(endings).rank == 0


def test_who_interrupts_a_hang_is_told_whose_it_was() -> None:
    endings = [ending(rank, -2, 101.0, stopped=True, state=state, looked_at=100.0)
               for rank, state in enumerate((WAITS, LOADS))]  # fmt: skip
    lines = judge(Events(endings, told=("", 2)), 0, 0).report.splitlines()
    assert lines[0].startswith("paceline launch: rank 1 held up the others: it was asleep in data loading")
    assert lines[1].startswith("paceline launch: ended by SIGINT")
    assert len(judge(Events(endings, told=("", 2)), 0, 0, quiet=True).report.splitlines()) == 1


def test_what_a_lost_hosts_peers_waited_for_is_told() -> None:
    endings = [ending(0, 1, 100.0, LOST, state=WAITS, looked_at=100.0)]
    report = judge(Events(endings, lost=["h1: its launcher ended"]), 0, 0).report
    assert report.splitlines()[-1] == "paceline launch: Rank 0 had waited 30 s for bucket 1 of 1 (w)."


def test_what_ranks_recorded_travels_between_hosts() -> None:
    member: Any = type("OfAnotherHost", (), {"name": "h1", "clock": 1000.0})
    travelled = _ending(member, json.loads(json.dumps(_fields(hang()[1]))))
    assert travelled.state == LOADS.moved(1000.0)
    assert (travelled.looked_at, travelled.host) == (1100.0, "h1")


@pytest.mark.parametrize("stopped", [False, True])
def test_of_ranks_out_of_step_the_one_that_skipped_is_the_cause(stopped: bool) -> None:
    apart = traceback("paceline.errors.RanksOutOfStepError: backward pass 5: the ranks are out of step")
    ranks = [RankState(rank, passes=5, forwards={5: 1 + rank}) for rank in range(2)]
    endings = [
        ending(0, 1, 100.0, apart, state=ranks[0], looked_at=100.0),
        ending(1, -15 if stopped else 1, 100.5, apart, stopped=stopped, state=ranks[1], looked_at=100.0),
    ]
    assert first_failure(endings).rank == 1
    assert "rank 1 ran 2: rank 1 skipped a backward" in last_lines(endings, 1)[0]
    assert "RanksOutOfStepError" in last_lines(endings, 2)[0]


def test_gloo_that_gives_up_over_different_calls_is_explained() -> None:
    said = (
        "terminate called after throwing ...\n  what():  op.preamble.length <= op.nbytes. 1000 vs 500. ...\n"
    )
    last = last_lines([ending(0, 1, 10.1, LOST), ending(1, -6, 10.0, said)], 1)[0]
    assert last.startswith(
        "paceline launch: rank 1 was killed by SIGABRT: Gloo gave up, because the ranks called"
    )
    assert "all must make the same calls" in last.lower()


def test_a_rank_that_did_not_leave_is_no_crash() -> None:
    stayed = ending(1, 1, 10.0, overstayed="waiting for its thread uploader")
    assert exit_status(stayed) == 1
    assert last_lines([ending(0, 0, 9.0), stayed], 1) == [
        "paceline launch: rank 1 did not leave Python, and was ended: it was waiting for its thread "
        "uploader. --exit_timeout gives it longer"
    ]


def test_ranks_that_were_ended_because_they_waited_for_each_other() -> None:
    waits = [
        RankState(
            rank,
            waits_for=f"a collective (barrier) in process group {rank + 1} at x.py:{rank}",
            waits_since=90.0,
        )
        for rank in range(2)
    ]
    endings = [ending(s.rank, 1, 100.0, deadlocked=True, state=s, looked_at=100.0) for s in waits]
    report = describe(endings, attempt=0, max_restarts=0).splitlines()
    assert report[:2] == [
        "paceline launch: rank 0 waited in vain (ended by the launcher, pid 100)",
        "paceline launch: rank 1 waited in vain, too (ended by the launcher)",
    ]
    assert "Rank 1 had waited 10 s for a collective (barrier) in process group 2 at x.py:1." in report[2]
    assert "in different process groups" in report[2] and len(report) == 3
    assert exit_status(first_failure(endings)) == 1
