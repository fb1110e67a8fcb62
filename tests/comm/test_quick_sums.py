"""All-reduces carried out in the calling thread: right, whichever way they take."""

from __future__ import annotations

import functools
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.quick_sums import QuickSums
from paceline.errors import CollectiveTimeoutError
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def of_every_form(rank: int) -> list[Tensor]:
    """Tensors of ranks' numbers: some whose memory is their values in order, some where it is not."""

    def whole(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.arange(24, dtype=dtype).view(4, 6) + rank

    return [
        whole(),
        whole().t(),
        whole()[1:3],
        whole()[:, 1],
        torch.tensor(float(rank)),
        torch.empty(0),
        torch.complex(whole(), -whole()),
        torch.complex(whole(), -whole()).conj().imag,
        torch.complex(whole(), -whole()).conj()[0, 1].imag,  # negated on reading, but contiguous
        torch.tensor([True, rank > 0]),
        *map(whole, (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)),
    ]


def sums_of_every_form(rank: int, world_size: int) -> None:
    everybodys = zip(*(of_every_form(r) for r in range(world_size)), strict=True)
    wanted = [functools.reduce(torch.add, tensors).clone() for tensors in everybodys]
    for where in ("anywhere", "arena"):
        for tensor, want in zip(of_every_form(rank), wanted, strict=True):
            if where == "arena" and tensor.is_contiguous() and not tensor.is_complex() and tensor.numel():
                there = dist.group.WORLD.allocate_tensor(tensor.numel(), dtype=tensor.dtype, device=CPU)
                tensor = there.view(tensor.shape).copy_(tensor)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, want), (where, tensor, want)


@pytest.mark.parametrize("world_size", [1, 3])
def test_tensors_of_every_form(world_size):
    run_ranks(sums_of_every_form, world_size, backend="shm")


def around_the_sizes(rank: int, world_size: int) -> None:
    """Sizes at which the kernel takes another way; the tensors of none, some and all ranks in the arena."""
    group = dist.group.WORLD
    for n_bytes in (4, 1020, 1024, 1028, 4096, 8188, 8192, 8196, 20_000):
        for in_arena in range(world_size + 1):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
                value = torch.arange(n_bytes // 4, dtype=torch.float32) * (rank + 1)
                if rank < in_arena:
                    there = group.allocate_tensor(n_bytes // 4, dtype=torch.float32, device=CPU)
                    value = there.copy_(value)
                factor = world_size * (world_size + 1) / 2 if op == dist.ReduceOp.SUM else world_size
                dist.all_reduce(value, op)
                want = torch.arange(n_bytes // 4, dtype=torch.float32) * factor
                assert torch.equal(value, want), (n_bytes, in_arena, op)
                other = torch.arange(n_bytes // 4, dtype=torch.float32) * (rank + 1)
                target = value.copy_(other) if rank < in_arena else other
                dist.reduce(target, 1, op)
                assert torch.equal(target, want if rank == 1 else torch.arange(n_bytes // 4) * (rank + 1.0))


def test_sizes_at_which_the_kernel_takes_another_way():
    run_ranks(around_the_sizes, 3, backend="shm")


def more_sizes_than_are_kept(rank: int, world_size: int) -> None:
    for _ in range(2):
        for n in range(1, QuickSums.MOST + 20):
            value = torch.full((n,), float(rank + n))
            dist.all_reduce(value)
            assert torch.equal(value, torch.full((n,), float(2 * n + 1))), n


def test_more_sizes_than_are_kept():
    run_ranks(more_sizes_than_are_kept, 2, backend="shm")


def alone(rank: int, world_size: int, timeout_s: float | None) -> tuple[float, str]:
    """Rank 1 does not come; how long rank 0 waits, and what it is told."""
    group, other = dist.group.WORLD, dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(1))  # with the timeout before
    options = dist.AllreduceOptions()
    options.asyncOp = False
    if timeout_s is None:
        group.set_timeout(timedelta(seconds=0.5))
    else:
        options.timeout = timedelta(seconds=timeout_s)
    waited, said = 0.0, ""
    if rank == 0:
        began = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match="rank 1 did not come") as caught:
            group.allreduce([torch.ones(1)], options)
        waited, said = time.monotonic() - began, str(caught.value)
    dist.barrier(other)
    return waited, said


@pytest.mark.parametrize("timeout_s", [None, 0.5])
def test_timeouts_that_change(timeout_s):
    waited, said = run_ranks(alone, 2, timeout_s, backend="shm", group_timeout=30)[0]
    assert waited < 20
    assert "timeout of 0.5 s" in said
