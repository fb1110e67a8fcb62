"""Threads that reduce along with their rank, where a host has cores to spare: forced on here."""

from __future__ import annotations

import functools
import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import hosts
from tests.ranks import run_ranks

CPU = torch.device("cpu")
NUMEL = 1_000_003  # several parts for each rank, and the last one is not whole
SUM, AVG, MAX, PRODUCT = (getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "MAX", "PRODUCT"))
FOLDS = {SUM: torch.add, PRODUCT: torch.mul, MAX: torch.maximum}
CASES = [
    *((torch.float32, op) for op in (SUM, MAX, PRODUCT)),
    *((dtype, SUM) for dtype in (torch.float64, torch.int64, torch.uint8)),
    *((dtype, AVG) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
]


@pytest.mark.parametrize(
    ("cores", "ranks", "wanted"),
    [(1, 4, 0), (2, 1, 0), (2, 2, 0), (8, 4, 0), (12, 4, 1), (16, 4, 2), (128, 8, 3), (128, 1, 3)],
)
def test_as_many_as_cores_are_spare(cores, ranks, wanted, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert hosts.helpers_of(ranks) == wanted


def values_of(rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(NUMEL, generator=generator).mul(9).to(dtype)


def group_with(helpers: int) -> dist.ProcessGroup:
    hosts.helpers_of = lambda _: helpers
    return dist.new_group(backend="shm")


def reduced(group: dist.ProcessGroup, rank: int, dtype: torch.dtype, op: dist.ReduceOp) -> Tensor:
    tensor = group.allocate_tensor(NUMEL, dtype=dtype, device=CPU).copy_(values_of(rank, dtype))
    dist.all_reduce(tensor, op, group=group)
    return tensor


def same_bits(rank: int, world_size: int) -> None:
    with_helpers, without = group_with(2), group_with(0)
    for dtype, op in CASES:
        got = reduced(with_helpers, rank, dtype, op)
        alone = reduced(without, rank, dtype, op)
        assert torch.equal(got.view(torch.uint8), alone.view(torch.uint8)), (dtype, op)
        if op in FOLDS:
            want = functools.reduce(FOLDS[op], (values_of(r, dtype) for r in range(world_size)))
            assert torch.equal(got, want), (dtype, op)


@pytest.mark.parametrize("world_size", [1, 3])
def test_results_have_the_same_bits(world_size):
    run_ranks(same_bits, world_size, backend="gloo")


def n_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def thread_counts(rank: int, world_size: int) -> list[int]:
    group = group_with(2)
    tensor = group.allocate_tensor(NUMEL, dtype=torch.float32, device=CPU)
    small = torch.ones(100_000)
    dist.all_reduce(small, group=group)  # too little to help with; the kernel has its own thread from now on
    counts = [n_threads()]
    tensor.fill_(1)
    dist.all_reduce(tensor, group=group)
    counts.append(n_threads())
    child = os.fork()
    if child == 0:
        os._exit(n_threads())
    _, status = os.waitpid(child, 0)
    counts.append(os.waitstatus_to_exitcode(status))
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, torch.full((NUMEL,), float(world_size**2)))
    dist.destroy_process_group(group)
    counts.append(n_threads())
    return counts


def test_they_start_when_needed_stay_with_the_parent_and_end_with_the_group():
    for before, helped, in_child, after in run_ranks(thread_counts, 2, backend="gloo"):
        assert helped == before + 2
        assert in_child == 1
        assert after <= before - 1
