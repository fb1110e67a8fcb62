"""One rank on a make-believe host; test_two_hosts.py starts some of them, each host a network namespace.

    python -m tests.comm.two_hosts RANK WORLD_SIZE FOLDER [train|bandwidth]

They meet through a file in FOLDER and leave what they found there.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

SIZES = (1 << 10, 1 << 20, 8 << 20)  # bytes


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
    dist.barrier()
    results = {"all_reduce": reduced, "broadcast": sent, "reduce_scatter": scattered}
    rows = {"all_gather": gathered, "all_to_all": exchanged}
    return {name: [t[0].item()] for name, t in results.items()} | {
        n: t[:, -1].tolist() for n, t in rows.items()
    }


def bandwidth(rank: int, world_size: int) -> dict[str, list[float]]:
    """Seconds of an all-reduce, quickest of some; shm and Gloo in turn."""
    groups = {"shm": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    times: dict[str, list[float]] = {name: [] for name in groups}
    for size in SIZES:
        value, rounds = torch.zeros(size // 4), []
        for _ in range(10):
            for group in groups.values():
                dist.barrier()
                began = time.perf_counter()
                dist.all_reduce(value, group=group)
                rounds.append(time.perf_counter() - began)
        slowest = torch.tensor(rounds).view(10, len(groups))
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        for name, seconds in zip(groups, slowest.min(dim=0).values.tolist(), strict=True):
            times[name].append(seconds)
    return times


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
