"""Random collectives on the shm group, held against Gloo and against plain arithmetic.

    python -m tests.comm.random_collectives 10000 4        so many of them on 4 ranks

Every rank draws the same collective, size, dtype, operation and root from a common seed, and its own place
and strides from one of its own. Inputs travel to all ranks over Gloo, where they are reduced in the order of
ranks: the result has to be equal bit for bit. Where Gloo has the operation itself, it is asked too.
"""

from __future__ import annotations

import functools
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import run_ranks

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
WHOLE = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool]
SIZES = [0, 1, 3, 17, 1000, 2049, 5000, 70_001, 300_007]
LIMIT = timedelta(seconds=60)
Op = dist.ReduceOp


@dataclass
class Draw:
    """What all ranks do next."""

    kind: str
    numel: int
    dtype: torch.dtype
    op: Any
    root: int


class Drawing:
    """One rank's view of a run.

    Args:
        rank: this rank.
        world_size: number of ranks.
        seed: of what is common to all ranks.
    """

    def __init__(self, rank: int, world_size: int, seed: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.common, self.own = random.Random(seed), random.Random(seed * 1000 + rank)
        self.group = dist.new_group(backend="shm", timeout=LIMIT)
        self.gloo = dist.new_group(backend="gloo", timeout=LIMIT)
        self.generator = torch.Generator().manual_seed(seed * 1000 + rank)

    def draw(self) -> Draw:
        kind = self.common.choice(list(KINDS))
        dtype = self.common.choice(FLOATS + WHOLE)
        ops = [Op.SUM, Op.AVG]
        if not dtype.is_complex:
            ops += [Op.MIN, Op.MAX, Op.PRODUCT]
        if dtype in WHOLE:
            ops += [Op.BAND, Op.BOR, Op.BXOR]
        if dtype.is_floating_point:
            ops.append(dist._make_nccl_premul_sum(0.3))
        root = self.common.randrange(self.world_size)
        return Draw(kind, self.common.choice(SIZES), dtype, self.common.choice(ops), root)

    def tensor(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Random values in a place of this rank's own choice: the arena, elsewhere, or with holes."""
        values = torch.randint(-3, 4, shape, generator=self.generator)
        if dtype.is_floating_point or dtype.is_complex:
            values = values + torch.rand(shape, generator=self.generator)
        place = self.own.choice(["arena", "plain", "strided"])
        if place == "arena":
            tensor = self.group.allocate_tensor(values.numel(), dtype=dtype, device=torch.device("cpu"))
            tensor = tensor.view(shape)
        elif place == "plain":
            tensor = torch.empty(shape, dtype=dtype)
        else:
            tensor = torch.empty((*shape, 2), dtype=dtype)[..., 0]
        return tensor.copy_(values)

    def everybodys(self, mine: Tensor) -> list[Tensor]:
        """All ranks' tensors, over Gloo."""
        if mine.numel() == 0:  # Gloo's own all_gather of nothing may hang
            return [mine.clone() for _ in range(self.world_size)]
        raw = torch.empty(mine.shape, dtype=mine.dtype).copy_(mine).view(-1).view(torch.uint8)
        gathered = [torch.empty_like(raw) for _ in range(self.world_size)]
        dist.all_gather(gathered, raw, group=self.gloo)
        return [one.view(mine.dtype).view(mine.shape) for one in gathered]

    def run(self, start: Callable[..., Any], *tensors: Any, **options: Any) -> None:
        """Synchronously, or waiting for the work or for its future."""
        how = self.own.choice(["sync", "wait", "future"])
        work = start(*tensors, group=self.group, async_op=how != "sync", **options)
        if how == "wait":
            work.wait()
        elif how == "future":
            work.get_future().wait()


def reduced(tensors: list[Tensor], op: Any) -> Tensor:
    """In the order of ranks; 16-bit floats in 32 bits, rounded once."""
    dtype = tensors[0].dtype
    wide = [t.float() if dtype in (torch.bfloat16, torch.float16) else t for t in tensors]
    state = op.__getstate__()
    kind, factor = state if isinstance(state, tuple) else (op, None)
    if factor is not None:
        wide = [t * factor for t in wide]
    if dtype is torch.bool:
        both = {"SUM": "or", "MAX": "or", "BOR": "or", "BXOR": "xor"}.get(kind.name, "and")
        return functools.reduce(getattr(torch, f"logical_{both}"), tensors)
    fold = {
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }.get(kind.name, torch.add)
    total = functools.reduce(fold, wide)
    if kind.name == "AVG":
        whole = not (dtype.is_floating_point or dtype.is_complex)
        parts = torch.view_as_real(total) if total.is_complex() else total
        parts = parts.div(len(tensors), rounding_mode="trunc" if whole else None)
        total = torch.view_as_complex(parts) if total.is_complex() else parts
    return total.to(dtype)


def same(found: Tensor, wanted: Tensor, what: str) -> None:
    """Equal bit for bit."""
    assert found.dtype == wanted.dtype and torch.equal(found, wanted), (
        f"{what}: {(found != wanted).sum()} of {found.numel()} elements differ, "
        f"for example {found[found != wanted][:3]} for {wanted[found != wanted][:3]}"
    )


def all_reduce(run: Drawing, draw: Draw) -> None:
    mine = run.tensor(draw.numel, dtype=draw.dtype)
    wanted = reduced(run.everybodys(mine), draw.op)
    by_gloo = mine.clone() if draw.dtype in (torch.float32, torch.int32) and draw.op == Op.SUM else None
    run.run(dist.all_reduce, mine, op=draw.op)
    same(mine, wanted, str(draw))
    if by_gloo is not None:
        dist.all_reduce(by_gloo, group=run.gloo)
        torch.testing.assert_close(mine, by_gloo)


def reduce(run: Drawing, draw: Draw) -> None:
    mine = run.tensor(draw.numel, dtype=draw.dtype)
    theirs = run.everybodys(mine)
    wanted = reduced(theirs, draw.op) if run.rank == draw.root else mine.clone()
    run.run(dist.reduce, mine, group_dst=draw.root, op=draw.op)
    same(mine, wanted, str(draw))


def broadcast(run: Drawing, draw: Draw) -> None:
    mine = run.tensor(draw.numel, dtype=draw.dtype)
    wanted = run.everybodys(mine)[draw.root]
    run.run(dist.broadcast, mine, group_src=draw.root)
    same(mine, wanted, str(draw))


def all_gather(run: Drawing, draw: Draw) -> None:
    mine = run.tensor(draw.numel, dtype=draw.dtype)
    wanted = run.everybodys(mine)
    found = [run.tensor(draw.numel, dtype=draw.dtype) for _ in range(run.world_size)]
    run.run(dist.all_gather, found, mine)
    for one, other in zip(found, wanted, strict=True):
        same(one, other, str(draw))


def all_gather_single(run: Drawing, draw: Draw) -> None:
    mine = run.tensor(draw.numel, dtype=draw.dtype)
    wanted = torch.cat(run.everybodys(mine))
    found = run.tensor(run.world_size * draw.numel, dtype=draw.dtype)
    run.run(dist.all_gather_single, found, mine)
    same(found, wanted, str(draw))


def reduce_scatter(run: Drawing, draw: Draw) -> None:
    mine = run.tensor(run.world_size, draw.numel, dtype=draw.dtype)
    wanted = reduced(run.everybodys(mine), draw.op)[run.rank]
    found = run.tensor(draw.numel, dtype=draw.dtype)
    run.run(dist.reduce_scatter, found, list(mine), op=draw.op)
    same(found, wanted, str(draw))


def reduce_scatter_single(run: Drawing, draw: Draw) -> None:
    mine = run.tensor(run.world_size, draw.numel, dtype=draw.dtype)
    wanted = reduced(run.everybodys(mine), draw.op)[run.rank]
    found = run.tensor(draw.numel, dtype=draw.dtype)
    run.run(dist.reduce_scatter_single, found, mine.view(-1) if mine.is_contiguous() else mine, op=draw.op)
    same(found, wanted, str(draw))


def all_to_all_single(run: Drawing, draw: Draw) -> None:
    mine = run.tensor(run.world_size, draw.numel, dtype=draw.dtype)
    wanted = torch.stack([other[run.rank] for other in run.everybodys(mine)])
    found = run.tensor(run.world_size, draw.numel, dtype=draw.dtype)
    run.run(dist.all_to_all_single, found, mine)
    same(found, wanted, str(draw))


def barrier(run: Drawing, draw: Draw) -> None:
    run.run(dist.barrier)


KINDS = {
    one.__name__: one
    for one in (
        all_reduce,
        reduce,
        broadcast,
        all_gather,
        all_gather_single,
        reduce_scatter,
        reduce_scatter_single,
        all_to_all_single,
        barrier,
    )
}


def compare(rank: int, world_size: int, count: int, seed: int) -> dict[str, int]:
    """Runs so many collectives; how many of each kind."""
    run = Drawing(rank, world_size, seed)
    seen = dict.fromkeys(KINDS, 0)
    for _ in range(count):
        draw = run.draw()
        KINDS[draw.kind](run, draw)
        seen[draw.kind] += 1
    return seen


def main(arguments: list[str]) -> None:
    count, world_size = int(arguments[0]), int(arguments[1])
    began = time.monotonic()
    seen = run_ranks(compare, world_size, count, 0, timeout=3600, backend="gloo", group_timeout=120)
    print(
        f"{count} collectives on {world_size} ranks, all as wanted, "
        f"in {time.monotonic() - began:.0f} s: {seen[0]}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
