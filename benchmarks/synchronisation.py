"""What averaging gradients costs: a training step minus the same step of the unwrapped model.

    python benchmarks/synchronisation.py                     2 ranks
    python benchmarks/synchronisation.py --ranks 4 --model transformer

The models are those of step.py. Every wrapper trains its own copy in the same processes, one step each in
turn; a step is forward, backward, SGD and zero_grad, started by all ranks together, and as long as that of
the slowest rank. Times are medians over the rounds. `sync` is the step minus that of the model `alone`, on
all ranks at once; the last columns hold it against torch's DDP over Gloo, and the step too.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from step import WORKLOADS, Workload  # beside this file
from torch import nn

ALONE, PEER, OURS = "alone", "torch DDP, gloo", "paceline, shm"


def wrappers() -> dict[str, Callable[[nn.Module], nn.Module]]:
    """What stands in the table; the groups are made by all ranks."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    from paceline import DistributedDataParallel

    torch_ddp = nn.parallel.DistributedDataParallel
    shm, gloo = dist.new_group(backend="shm"), dist.new_group(backend="gloo")
    shm_mesh, gloo_mesh = (DeviceMesh.from_group(group, "cpu") for group in (shm, gloo))
    return {
        ALONE: lambda model: model,
        PEER: lambda model: torch_ddp(model, process_group=gloo),
        "torch DDP, shm": lambda model: torch_ddp(model, process_group=shm),
        "paceline, gloo": lambda model: DistributedDataParallel(model, process_group=gloo),
        OURS: lambda model: DistributedDataParallel(model, process_group=shm),
        "FSDP2, gloo": lambda model: fully_shard(model, mesh=gloo_mesh),
        "FSDP2, shm": lambda model: fully_shard(model, mesh=shm_mesh),
    }


def measure(rank: int, workload: Workload, options: argparse.Namespace) -> dict[str, float]:
    """Median seconds of a step, `{wrapper: seconds}`; equal on all ranks."""
    torch.manual_seed(0)
    model = workload.build()
    torch.manual_seed(1 + rank)
    inputs = workload.inputs()
    targets = torch.randint(10, (len(inputs),))
    modules = {name: wrap(copy.deepcopy(model)) for name, wrap in wrappers().items()}
    optimizers = {name: torch.optim.SGD(module.parameters(), lr=1e-3) for name, module in modules.items()}

    def step(name: str) -> float:
        dist.barrier()
        began = time.perf_counter()
        nn.functional.cross_entropy(modules[name](inputs), targets).backward()
        optimizers[name].step()
        optimizers[name].zero_grad()
        return time.perf_counter() - began

    for _ in range(options.warmup):
        for name in modules:
            step(name)
    gc.collect()
    gc.disable()
    times = torch.tensor([[step(name) for name in modules] for _ in range(options.rounds)])
    gc.enable()
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return dict(zip(modules, (statistics.median(column) for column in times.T.tolist()), strict=True))


def rank_main(rank: int, folder: str, name: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=options.ranks
    )
    times = measure(rank, WORKLOADS[name], options)
    if rank == 0:
        print("\n".join(lines(name, times)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def lines(model: str, times: dict[str, float]) -> list[str]:
    alone, peer = times[ALONE], times[PEER]
    rows = []
    for name, seconds in times.items():
        row = f"{model:20} {name:16} {seconds * 1e3:>9.2f}"
        if name != ALONE:
            sync = seconds - alone
            row += f" {sync * 1e3:>9.2f} {sync / (peer - alone):>10.2f} {seconds / peer:>10.2f}"
        rows.append(row)
    return rows


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--model", choices=WORKLOADS, action="append", help="may be given several times")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.ranks)))
    print(f"torch {torch.__version__}, {options.ranks} ranks, {os.cpu_count()} cores")
    print(f"{'':37} {'step, ms':>9} {'sync, ms':>9} {'sync ratio':>10} {'step ratio':>10}", flush=True)
    for name in options.model or WORKLOADS:
        with tempfile.TemporaryDirectory(prefix="paceline-sync-") as folder:
            mp.spawn(rank_main, args=(folder, name, options), nprocs=options.ranks)


if __name__ == "__main__":
    main(sys.argv[1:])
