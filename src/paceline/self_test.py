"""What ``paceline test`` runs on every rank: trains a tiny model, and compares.

The replicas must be bit-identical afterwards, and equal (to rounding) to one process that was
trained on the joined batches, which every rank computes for itself.
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from paceline.comm.select import choose_device, initialize_process_group
from paceline.engine.ddp import DistributedDataParallel
from paceline.engine.verify import verify_replicas

_STEPS, _SAMPLES, _FEATURES = 20, 4, 8  # samples: of each rank in a step
_TOLERANCE = 1e-9


def run() -> str:
    """Train and compare.

    Returns:
        A sentence about what was tried, on every rank.

    Raises:
        ReplicaMismatchError: the ranks' models differ.
        RuntimeError: they differ from the model that was trained on the joined batches.
    """
    device = choose_device()
    backend = initialize_process_group(device=device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    single = nn.Sequential(nn.Linear(_FEATURES, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    model = DistributedDataParallel(copy.deepcopy(single).to(device))
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(single.parameters(), lr=0.1)
    for _ in range(_STEPS):
        batch = torch.randn(world_size * _SAMPLES, _FEATURES, dtype=torch.float64, device="cpu")
        mine = batch[rank * _SAMPLES : (rank + 1) * _SAMPLES].to(device)
        _step(model, mine, ours)
        _step(single, batch, reference)
    group = dist.group.WORLD
    assert group is not None
    verify_replicas(model.module, group)
    distance = max(
        float((one.detach().cpu() - other.detach()).abs().max())
        for one, other in zip(model.module.parameters(), single.parameters(), strict=True)
    )
    if distance > _TOLERANCE:
        raise RuntimeError(
            f"rank {rank}: after {_STEPS} steps the model is {distance:.3g} away from the one that a single "
            f"process trained on the joined batches"
        )
    return (
        f"{world_size} rank(s) on {device.type} ({backend.reason}): after {_STEPS} steps replicas are "
        f"bit-identical and within {distance:.1e} of one process on the joined batches"
    )


def _step(model: nn.Module, batch: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    mse_loss(model(batch), batch.sum(1, keepdim=True).sin()).backward()
    optimizer.step()


if __name__ == "__main__":
    said = run()
    if dist.get_rank() == 0:
        sys.stdout.write(f"paceline test: ok: {said}\n")
    dist.destroy_process_group()
