"""Peak resident memory of a rank in training, beside torch's DistributedDataParallel.

    python benchmarks/memory.py                  2 ranks, gloo, a model of 256 MiB
    python benchmarks/memory.py --ranks 4 --mib 64

Each wrapper trains in processes of its own: forward, backward, zero_grad, five times, without an
optimizer. The number is the highest resident memory seen (VmHWM) beyond what the rank held before it built
the model, over the bytes of the parameters. 1.0 is the parameters, 1.0 their gradients; what is above 2.0 is
the wrapper's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

MIB = 1 << 20
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "torch": ("torch.nn.parallel:DistributedDataParallel", {}),
    "torch, bucket views": ("torch.nn.parallel:DistributedDataParallel", {"gradient_as_bucket_view": True}),
    "paceline": ("paceline:DistributedDataParallel", {}),
    "paceline, bucket views": ("paceline:DistributedDataParallel", {"gradient_as_bucket_view": True}),
}


class Blocks(nn.Module):
    """Parameters of 1 MiB and 4 KiB in turn, each used on its own, so that activations count for nothing."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        sizes = [MIB // 4, 1024] * mib
        self.blocks = nn.ParameterList(nn.Parameter(torch.ones(size)) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        return sum((block * x).sum() for block in self.blocks)


def peak_bytes() -> int:
    """Highest resident memory of this process since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> int:
    """Let the peak start again from what is resident now, and return that."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def train(module: nn.Module, steps: int) -> None:
    for _ in range(steps):
        module(torch.ones(1)).backward()
        module.zero_grad(set_to_none=True)


def rank_main(rank: int, folder: str, name: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        options.backend, init_method=f"file://{folder}/meet", rank=rank, world_size=options.ranks
    )
    spec, arguments = CONTENDERS[name]
    home, _, attribute = spec.partition(":")
    wrapper = getattr(importlib.import_module(home), attribute)
    train(wrapper(Blocks(1), **arguments), 2)  # what is imported and allocated once does not count
    before = forget_peak()
    model = wrapper(Blocks(options.mib), **arguments)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    train(model, 5)
    Path(folder, f"rank{rank}").write_text(json.dumps((peak_bytes() - before) / size))
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str, options: argparse.Namespace) -> float:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder, name, options), nprocs=options.ranks)
        return max(json.loads(Path(folder, f"rank{rank}").read_text()) for rank in range(options.ranks))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--mib", type=int, default=256, help="size of the model")
    options = parser.parse_args()
    # freed blocks go back to the system at once, so that the allocator's reserve does not count
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    print(f"torch {torch.__version__}, {options.ranks} ranks, {options.backend}, model of {options.mib} MiB")
    print("peak resident memory / parameters")
    for name in CONTENDERS:
        print(f"{name:24} {measure(name, options):.2f}", flush=True)


if __name__ == "__main__":
    main()
