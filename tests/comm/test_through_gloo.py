"""What the shm group leaves to Gloo: tensors of any dtype and strides, and calls that cannot work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import ArgumentError
from tests.ranks import run_ranks

DTYPES = [torch.float32, torch.bool, torch.int16, torch.uint64, torch.complex64, torch.float8_e4m3fn]


def contiguous(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def with_holes(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros((*shape, 2), dtype=dtype)[..., 0]


def transposed(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape[::-1], dtype=dtype).permute(*range(len(shape))[::-1])


FORMS = [contiguous, with_holes, transposed]
Make = Callable[..., Tensor]


def pattern(rows: int, dtype: torch.dtype, rank: int, part: int) -> Tensor:
    """What rank `rank` has for rank `part`."""
    bits = (torch.arange(3 * rows).view(rows, 3) // (1 + rank + 2 * part)) % 2
    return bits.to(dtype)


def filled(make: Make, rows: int, dtype: torch.dtype, rank: int, part: int = 0) -> Tensor:
    return make(rows, 3, dtype=dtype).copy_(pattern(rows, dtype, rank, part))


def same(found: Tensor, wanted: Tensor) -> bool:
    found, wanted = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (found, wanted))
    return torch.equal(found, wanted)


def moved(rank: int, world_size: int) -> None:
    for dtype in DTYPES:
        for make in FORMS:
            gathered_and_scattered(rank, world_size, make, dtype)
            swapped(rank, world_size, make, dtype)
            passed_on(rank, world_size, make, dtype)


def gathered_and_scattered(rank: int, world_size: int, make: Make, dtype: torch.dtype) -> None:
    last = world_size - 1
    gathered = [make(4, 3, dtype=dtype) for _ in range(world_size)] if rank == last else None
    dist.gather(filled(make, 4, dtype, rank), gathered, dst=last)
    for other, one in enumerate(gathered or []):
        assert same(one, pattern(4, dtype, other, 0))
    parts = [filled(make, 4, dtype, 0, part) for part in range(world_size)] if rank == 0 else None
    work = dist.scatter(mine := make(4, 3, dtype=dtype), parts, src=0, async_op=True)
    work.wait()
    assert same(mine, pattern(4, dtype, 0, rank))


def swapped(rank: int, world_size: int, make: Make, dtype: torch.dtype) -> None:
    """Rank r sends r + p rows to rank p: none from rank 0 to itself."""
    sent = [filled(make, rank + part, dtype, rank, part) for part in range(world_size)]
    received = [make(rank + other, 3, dtype=dtype) for other in range(world_size)]
    dist.all_to_all(received, sent)
    for other, one in enumerate(received):
        assert same(one, pattern(rank + other, dtype, other, rank))


def passed_on(rank: int, world_size: int, make: Make, dtype: torch.dtype) -> None:
    """To the next rank, from that before and from whichever it is."""
    before, after = (rank - 1) % world_size, (rank + 1) % world_size
    sent, received = filled(make, 5, dtype, rank), make(5, 3, dtype=dtype)
    works = [dist.irecv(received, before), dist.isend(sent, after)]
    for work in works:
        work.wait()
    assert same(received, pattern(5, dtype, before, 0)) and works[0]._source_rank() == before
    work = dist.isend(filled(make, 5, dtype, rank, part=1), after)
    assert dist.recv(received) == before
    work.wait()
    assert same(received, pattern(5, dtype, before, 1))


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_dtype_and_strides(world_size):
    run_ranks(moved, world_size, backend="shm")


def refusals_of_roots(rank: int, world_size: int) -> list[str]:
    """What is said about roots that do not exist; then the ranks go on."""
    group, tensor = dist.group.WORLD, torch.ones(3)
    calls: list[tuple[Any, Any, tuple[Any, ...]]] = [
        (dist.BroadcastOptions, group.broadcast, ([tensor],)),
        (dist.ReduceOptions, group.reduce, ([tensor],)),
        (dist.GatherOptions, group.gather, ([], [tensor])),
        (dist.ScatterOptions, group.scatter, ([tensor], [])),
    ]
    said = []
    for options_class, call, arguments in calls:
        for root in (world_size, -1):
            options = options_class()
            options.rootRank = root
            with pytest.raises(ArgumentError) as caught:
                call(*arguments, options)
            said.append(str(caught.value))
    dist.all_reduce(tensor)
    assert tensor[0] == world_size
    return said


def test_a_root_that_does_not_exist_is_refused():
    text = "the root of a collective is rank {}, but the group has ranks 0 to 1"
    for said in run_ranks(refusals_of_roots, 2, backend="shm"):
        assert said == [text.format(root) for _ in range(4) for root in (2, -1)]


def sums_of_parts(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    parts = [torch.full((3,), 10.0 * part + rank) for part in range(world_size)]
    total = torch.tensor([10.0 * rank * world_size + sum(range(world_size))] * 3)
    forms: list[tuple[Any, ...]] = [
        (found := torch.empty(3), parts),
        (found, parts, dist.ReduceOp.SUM),
        ([found], [parts]),
    ]
    for arguments in forms:
        found.zero_()
        group.reduce_scatter(*arguments).wait()
        assert torch.equal(found, total)


def test_forms_in_which_a_reduce_scatter_may_be_called():
    run_ranks(sums_of_parts, 2, backend="shm")
