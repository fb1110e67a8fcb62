"""The engine alone, in a plain PyTorch loop on 1,797 real handwritten digits.

    python examples/bare_loop.py                                   one rank
    paceline launch --cpu --num_processes 2 examples/bare_loop.py  two; torchrun will do as well

Beside the import, the loop is what it would be with torch's own DistributedDataParallel. A global batch
is 64 digits, of which each rank takes its share, so the losses do not depend on the number of ranks.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

from paceline import DistributedDataParallel as DDP

GLOBAL_BATCH = 64


def join_ranks() -> None:
    """Brings up the process group; a script that was started alone is rank 0 of 1."""
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """All digits as rows of 64 pixels between 0 and 1, in one fixed random order, and what they show."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(digits.data / 16, dtype=torch.float32)[order], torch.tensor(digits.target)[order]


def train(model: nn.Module, pixels: torch.Tensor, labels: torch.Tensor, epochs: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1 + epoch))
        total = torch.zeros(())
        batches = order.split(GLOBAL_BATCH)[:-1]  # the last is short; another order reaches its digits
        for batch in batches:
            own = batch[rank::world_size]
            loss = nn.functional.cross_entropy(model(pixels[own]), labels[own])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total.item() / len(batches) / world_size:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    epochs = parser.parse_args().epochs

    join_ranks()
    pixels, labels = load()
    held_out = len(labels) // 5
    torch.manual_seed(0)
    model = DDP(
        nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))
    )
    train(model, pixels[held_out:], labels[held_out:], epochs)
    if dist.get_rank() == 0:  # no collective in evaluation, so one rank may do it alone
        model.eval()
        with torch.no_grad():
            right = (model(pixels[:held_out]).argmax(dim=1) == labels[:held_out]).float().mean()
        print(f"accuracy on {held_out} held-out digits: {right:.2%}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
