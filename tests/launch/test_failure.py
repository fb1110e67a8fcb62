"""The report: which failure is the first, and that its own words come last."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.launch.failure import (
    Ending,
    describe,
    exit_status,
    first_failure,
    last_traceback,
    only_lost_peers,
)


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
