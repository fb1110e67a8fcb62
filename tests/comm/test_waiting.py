"""What is said when a wait fails."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.comm.waiting import Peers
from paceline.errors import CollectiveTimeoutError, CommunicationError, PeerLostError
from paceline.recorder.ring import recorder
from tests.ranks import run_ranks


def collective_the_group_cannot_do(rank: int, world: int) -> str:
    values = torch.ones(1, 2, dtype=torch.float16)
    sparse = torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.long), values, (3, 2))
    with pytest.raises(CommunicationError) as raised:
        Peers(dist.group.WORLD).wait(dist.all_reduce(sparse, async_op=True), lambda: "all-reduce of a table")
    assert not isinstance(raised.value, PeerLostError)
    return str(raised.value)


def test_a_collective_that_the_group_cannot_do_is_put_down_to_no_rank() -> None:
    for rank, words in enumerate(run_ranks(collective_the_group_cannot_do, 2, timeout=60)):
        assert words.startswith(f"rank {rank}: all-reduce of a table failed in the process group: ")
        assert "not implemented" in words
        assert f"rank {1 - rank}" not in words


def one_rank_does_not_come(rank: int, world: int) -> str:
    peers = Peers(dist.group.WORLD)
    recorder().step = 118
    if rank == 1:
        recorder().phase("loading data")
        time.sleep(6.0)
        return ""
    with pytest.raises(CollectiveTimeoutError) as raised:
        peers.wait(dist.all_reduce(torch.ones(1), async_op=True), lambda: "all-reduce of one")
    return str(raised.value)


def test_the_error_says_where_a_missing_rank_was_seen(tmp_path: Path) -> None:
    """No launcher of ours is needed: the ranks of a host read each other's records."""
    variables = {"PACELINE_RECORDS": str(tmp_path)}
    told = run_ranks(one_rank_does_not_come, 2, timeout=60, group_timeout=3.0, environment=variables)[0]
    assert "rank 1 did not come before the timeout" in told
    assert re.search(r"Rank 1 was .*loading data \(step 118\)\.", told)


def explained(rank: int, world: int) -> list[str]:
    """Gloo's words, depending on which of its threads notices first."""
    texts = ("Timed out waiting 5000ms for recv operation", "Application timeout caused pair closure")
    return [type(Peers(dist.group.WORLD).explain(RuntimeError(text), "a sum")).__name__ for text in texts]


def test_both_of_gloos_ways_to_say_that_time_is_up_are_understood() -> None:
    assert run_ranks(explained, 2, timeout=60) == [["CollectiveTimeoutError"] * 2] * 2


def behind_a_rank_that_sleeps(rank, world):
    """Of the collectives in flight one times out, and the others fail because it did."""
    peers = Peers(dist.group.WORLD)
    if rank:
        time.sleep(4)
        return None
    works = [dist.all_reduce(torch.ones(1 << 18), async_op=True) for _ in range(2)]
    raised = []
    for work in works:
        with pytest.raises(CollectiveTimeoutError) as error:
            peers.wait(work, lambda: "all-reduce")
        raised.append(error.value)
    return [(str(error), _depth(error)) for error in raised]


def _depth(error: BaseException | None) -> int:
    return 0 if error is None else 1 + _depth(error.__cause__ or error.__context__)


def test_what_fails_because_of_a_timeout_is_a_timeout() -> None:
    waited, _ = run_ranks(behind_a_rank_that_sleeps, 2, backend="gloo", group_timeout=1, timeout=60)
    for words, depth in waited:
        assert "rank 1 did not come before the timeout" in words
        assert depth == 2  # what was raised, and what the group said
