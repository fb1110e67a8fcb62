"""What is said when a wait fails."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from paceline.comm.waiting import Peers
from paceline.errors import CommunicationError, PeerLostError
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
