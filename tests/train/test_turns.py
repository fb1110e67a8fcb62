"""One rank at a time: waiting has no limit while the other lives, and ends when it is gone."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.train.turns import Turns
from tests.ranks import rank_outcomes, run_ranks
from tests.train.models import settings


def main_first(rank: int, world_size: int, folder: Path) -> list[str]:
    """Three turns with a timeout of collectives shorter than the first."""
    args = settings(folder, ddp_timeout=1)
    seen = []
    for turn in range(3):
        with args.main_process_first(local=turn != 1, desc="preparing"):
            if rank == 0:
                time.sleep(2.0 if turn == 0 else 0.1)
                (folder / f"ready{turn}").touch()
            seen.append((folder / f"ready{turn}").exists())
    return seen


def test_the_main_rank_may_take_longer_than_the_timeout(tmp_path: Path) -> None:
    assert run_ranks(main_first, 3, tmp_path, backend=None) == [[True] * 3] * 3


def first_fails(rank: int, world_size: int, folder: Path, kill: bool) -> None:
    args = settings(folder, ddp_timeout=600)
    if rank == 1:
        (folder / "has_a_group").touch()
    while not (folder / "has_a_group").exists():
        time.sleep(0.01)
    with args.main_process_first(desc="tokenizing"):
        if rank == 0 and kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            raise LookupError("no such file")


def test_a_main_rank_that_raises_says_so(tmp_path: Path) -> None:
    first, second = rank_outcomes(first_fails, 2, tmp_path, False, backend=None)
    assert "LookupError" in str(first.error)
    assert "PeerFailedError: rank 1 waited for rank 0 (tokenizing), which raised LookupError" in str(
        second.error
    )


def test_a_main_rank_that_dies_is_noticed(tmp_path: Path) -> None:
    first, second = rank_outcomes(first_fails, 2, tmp_path, True, backend=None, timeout=30)
    assert first.exit_code == -signal.SIGKILL
    assert "PeerLostError: rank 1 waited for rank 0 (tokenizing)" in str(second.error)


def rank_zero_results(rank: int, world_size: int) -> list[Any]:
    turns = Turns()
    return [turns.on_rank_zero(partial(dict, rank=rank, turn=turn), "work") for turn in range(3)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_rank_zeros_result_is_everyones(world_size: int) -> None:
    want = [{"rank": 0, "turn": turn} for turn in range(3)]
    assert run_ranks(rank_zero_results, world_size) == [want] * world_size
