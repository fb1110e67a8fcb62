"""Forked processes, as DataLoader workers are, inherit a rank's process groups and must leave them alone."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from paceline import DistributedDataParallel
from tests.ranks import run_ranks


class Collecting(Dataset[int]):
    """Whoever reads it runs the garbage collector, as happens sooner or later in every process."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return index


def train(model: nn.Module) -> None:
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()


def garbage_of_wrappers() -> None:
    """Wrappers and groups that only the garbage collector can free."""
    wrapper = DistributedDataParallel(nn.Linear(4, 4))
    train(wrapper)
    used = dist.new_group(list(range(dist.get_world_size())))
    dist.all_reduce(torch.ones(100), group=used)
    cycle: list[Any] = [wrapper, used]
    cycle.append(cycle)
    dist.destroy_process_group(used)


def read_with_workers(rank: int, world_size: int, left: str) -> list[int]:
    gc.disable()  # the parent shall not be quicker than its children
    if left == "wrapper in use":
        kept = DistributedDataParallel(nn.Linear(4, 4))
    else:
        garbage_of_wrappers()
        kept = None
    loader = DataLoader(
        Collecting(), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=20
    )
    read = [int(index) for index in loader]
    if kept is not None:
        train(kept)
    gc.enable()
    gc.collect()
    return read


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("left", ["wrapper in use", "garbage"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_worker_that_collects_garbage_goes_on(world_size: int, left: str, backend: str) -> None:
    read = run_ranks(read_with_workers, world_size, left, backend=backend)
    assert read == [[0, 1, 2, 3]] * world_size
