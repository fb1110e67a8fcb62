"""Collectives whose input and output share memory, wherever they lie in it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import ArgumentError
from tests.ranks import run_ranks

CPU = torch.device("cpu")
PARTS = [4, 3000, 400_000]  # elements: the kernel takes another way for each


def buffer(numel: int, in_arena: bool) -> Tensor:
    group = dist.group.WORLD
    return group.allocate_tensor(numel, dtype=torch.float32, device=CPU) if in_arena else torch.zeros(numel)


def value_of(rank: int, numel: int) -> Tensor:
    return ((torch.arange(numel) // 3 * (rank + 2) + 5 * rank) % 31).float()


def in_one_memory(rank: int, world_size: int) -> None:
    for in_arena in (True, False):
        for part in PARTS:
            whole = part * world_size
            places = [rank * part, 0, whole - part, part // 2]  # of the smaller side in the larger one
            for place in places:
                gathered_in_place(rank, world_size, buffer(whole, in_arena), part, place)
                scattered_in_place(rank, world_size, buffer(whole, in_arena), part, place)
            swapped_in_place(rank, world_size, buffer(whole, in_arena), part)
            swapped_in_place(rank, world_size, buffer(2 * whole, in_arena), part, shift=part + 1)


def gathered_in_place(rank: int, world_size: int, whole: Tensor, part: int, place: int) -> None:
    source = whole[place : place + part]
    source.copy_(value_of(rank, part))
    dist.all_gather_single(whole, source)
    assert torch.equal(whole, torch.cat([value_of(r, part) for r in range(world_size)])), (part, place)


def scattered_in_place(rank: int, world_size: int, whole: Tensor, part: int, place: int) -> None:
    numel = whole.numel()
    whole.copy_(value_of(rank, numel))
    dist.reduce_scatter_single(target := whole[place : place + part], whole)
    total = sum(value_of(r, numel) for r in range(world_size))
    assert torch.equal(target, total[rank * part :][:part]), (part, place)


def swapped_in_place(rank: int, world_size: int, memory: Tensor, part: int, shift: int = 0) -> None:
    numel = part * world_size
    source, target = memory[:numel], memory[shift : shift + numel]
    source.copy_(value_of(rank, numel))
    dist.all_to_all_single(target, source)
    wanted = torch.cat([value_of(r, numel)[rank * part :][:part] for r in range(world_size)])
    assert torch.equal(target, wanted), (part, shift)


@pytest.mark.parametrize("world_size", [2, 3])
def test_input_and_output_in_one_memory(world_size):
    run_ranks(in_one_memory, world_size, backend="shm")


def reductions_of_fp8(rank: int, world_size: int) -> str:
    tensor = torch.ones(4).to(torch.float8_e5m2)
    calls = [
        lambda: dist.all_reduce(tensor),
        lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True),
        lambda: dist.reduce(tensor, 0),
        lambda: dist.reduce_scatter_single(tensor[:2], tensor),
    ]
    said = set()
    for call in calls:
        with pytest.raises(ArgumentError) as caught:
            call()
        said.add(str(caught.value))
    gathered = torch.empty(8, dtype=torch.float8_e5m2)
    dist.all_gather_single(gathered, tensor)  # what only copies goes on
    assert torch.equal(gathered.float(), torch.ones(8))
    (text,) = said
    return text


def test_what_nobody_can_add_up_is_refused_in_words():
    texts = run_ranks(reductions_of_fp8, 2, backend="shm")
    wanted = "ranks cannot reduce torch.float8_e5m2: convert the tensor before, for example to torch.bfloat16"
    assert texts == [wanted] * 2
