"""One rank on a make-believe host; test_two_hosts.py starts some of them, each host a network namespace.

    python -m tests.comm.two_hosts RANK WORLD_SIZE FOLDER [train|bandwidth]

They meet through a file in FOLDER and leave what they found there.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

SIZES = (4 << 10, 1 << 20, 25 << 20)  # bytes


def train(rank: int, world_size: int) -> dict[str, Any]:
    """Weights after some steps of both wrappers, in hexadecimal, and how far they are from one process's."""
    batch = torch.randn(8 * world_size, 64, generator=torch.Generator().manual_seed(1))
    mine = batch[8 * rank : 8 * rank + 8]
    wanted = trained(a_net(), batch)
    found = {name: trained(wrap(a_net()), mine) for name, wrap in wrappers().items()}
    return {
        "collectives": collectives(rank, world_size),
        "weights": {name: weights.numpy().tobytes().hex() for name, weights in found.items()},
        "difference": {name: (weights - wanted).abs().max().item() for name, weights in found.items()},
    }


def wrappers() -> dict[str, Any]:
    from paceline import DistributedDataParallel

    return {"ours": DistributedDataParallel, "torch": nn.parallel.DistributedDataParallel}


def a_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 4))


def trained(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        net(batch).pow(2).mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def collectives(rank: int, world_size: int) -> dict[str, list[float]]:
    """The first element of what each rank gets; rank r brings r + 1."""
    mine = torch.full((5000,), rank + 1.0)
    reduced, sent, scattered = mine.clone(), mine.clone(), torch.empty(5000)
    gathered, exchanged = torch.empty(world_size, 5000), torch.empty(world_size, 5000)
    dist.all_reduce(reduced)
    dist.broadcast(sent, world_size - 1)
    dist.all_gather_single(gathered, mine)
    dist.reduce_scatter_single(scattered, torch.stack([mine * r for r in range(world_size)]))
    dist.all_to_all_single(exchanged, gathered * mine[0])
    odd = odd_ones(rank, world_size)
    dist.barrier()
    results = {"all_reduce": reduced, "broadcast": sent, "reduce_scatter": scattered}
    rows = {"all_gather": gathered, "all_to_all": exchanged}
    return (
        {name: [t[0].item()] for name, t in results.items()}
        | {n: t[:, -1].tolist() for n, t in rows.items()}
        | {"odd": odd}
    )


def odd_ones(rank: int, world_size: int) -> list[float]:
    """Sums over what broadcasts and all-gathers of all kinds of tensors bring; equal on all ranks."""
    sums = []
    for root in range(world_size):
        apart = torch.full((7, 3), rank + 1.0, dtype=torch.bfloat16)[::2, 1:]  # not contiguous
        single, truth, nothing = torch.tensor(rank + 1j), torch.tensor([rank == root] * 3), torch.empty(0)
        for tensor in (apart, single, truth, nothing):
            dist.broadcast(tensor, root)
            sums.append(tensor.real.double().sum().item())
    for mine in (torch.full((3,), rank + 1, dtype=torch.int8), torch.full((2, 2), rank + 1j), torch.empty(0)):
        gathered = mine.new_empty(world_size * mine.numel())
        dist.all_gather_single(gathered, mine.t())
        place = torch.arange(1.0, gathered.numel() + 1)
        sums.append((gathered.real.double() * place).sum().item())
    return sums


def bandwidth(rank: int, world_size: int) -> dict[str, list[float]]:
    """Seconds of a collective for each of SIZES, quickest of some; shm and Gloo in turn."""
    groups = {"shm": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    times: dict[str, list[float]] = {}
    for size in SIZES:
        value = torch.zeros(size // 4)
        whole = value.new_empty(world_size * value.numel())
        runs = {
            "all_reduce": partial(dist.all_reduce, value),
            "broadcast": partial(dist.broadcast, value, world_size - 1),
            "all_gather": partial(dist.all_gather_single, whole, value),
        }
        contenders = [
            (f"{kind}, {name}", run, group) for kind, run in runs.items() for name, group in groups.items()
        ]
        slowest = torch.tensor([[timed(run, group) for _, run, group in contenders] for _ in range(10)])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        for (name, _, _), seconds in zip(contenders, slowest.min(dim=0).values.tolist(), strict=True):
            times.setdefault(name, []).append(seconds)
    return times


def timed(run: Callable[..., Any], group: dist.ProcessGroup) -> float:
    dist.barrier()
    began = time.perf_counter()
    run(group=group)
    return time.perf_counter() - began


def main(rank: int, world_size: int, folder: Path, task: str = "train") -> None:
    log = folder / f"log{rank}"
    logging.basicConfig(filename=log, level=logging.INFO)
    torch.set_num_threads(1)
    dist.init_process_group("shm", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    found = {"train": train, "bandwidth": bandwidth}[task](rank, world_size)
    (folder / f"rank{rank}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
