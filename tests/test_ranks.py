"""The harness itself: ranks meet, failures come out, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, rank_outcomes, run_ranks


def add_up(rank: int, world_size: int, scale: float) -> float:
    value = torch.tensor(scale * rank)
    dist.all_reduce(value)
    assert dist.get_world_size() == world_size
    return value.item()


def fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("the culprit")
    dist.barrier()


def killed_on_one(rank: int, world_size: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def hang(rank: int, world_size: int) -> None:
    while True:
        time.sleep(0.1)


def start_a_sleeper(rank: int, world_size: int) -> int:
    return subprocess.Popen(["sleep", "300"]).pid


def variables(rank: int, world_size: int) -> tuple[str, str, bool]:
    return os.environ["RANK"], os.environ["GIVEN"], dist.is_initialized()


def test_each_rank_returns_its_value() -> None:
    assert run_ranks(add_up, 3, 10.0) == [30.0, 30.0, 30.0]


def test_failure_raises_with_the_culprits_traceback_first() -> None:
    with pytest.raises(RankError) as failure:
        run_ranks(fail_on_one, 2)
    assert str(failure.value).startswith("rank 1 raised:")
    assert "the culprit" in str(failure.value)


def test_outcomes_tell_a_killed_rank_from_one_that_returned() -> None:
    first, second = rank_outcomes(killed_on_one, 2)
    assert first.returned
    assert first.value == "alive"
    assert not second.returned
    assert second.exit_code == -signal.SIGKILL


def test_ranks_that_hang_are_cut_off_and_their_stack_is_shown() -> None:
    with pytest.raises(RankError, match=r"did not end in time(.|\n)*in hang"):
        run_ranks(hang, 2, timeout=2.0)


def test_what_a_rank_leaves_behind_is_killed() -> None:
    (pid,) = run_ranks(start_a_sleeper, 1)
    deadline = time.monotonic() + 5.0
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(pid)


def test_ranks_get_the_environment_of_now_and_no_group_if_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(add_up, 1, 1.0)  # the server that forks ranks runs by now
    monkeypatch.setenv("GIVEN", "later")
    assert run_ranks(variables, 2, backend=None) == [("0", "later", False), ("1", "later", False)]
    assert run_ranks(variables, 1, environment={"GIVEN": "here"}) == [("0", "here", True)]


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
