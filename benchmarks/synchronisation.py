"""What averaging gradients costs: a training step minus the same step of the unwrapped model.

    python benchmarks/synchronisation.py                     2 ranks
    python benchmarks/synchronisation.py --ranks 2 4 --model transformer

The models are those of step.py. Every wrapper trains its own copy in the same processes, one step each in
turn; a step is forward, backward, SGD and zero_grad, started by all ranks together, and as long as that of
the slowest rank. Times are medians over the rounds. `sync` is the step minus that of the model `alone`, on
all ranks at once; the last columns hold it against torch's DDP over Gloo, and the step too. At the end
stand the step and the synchronisation of torch's DDP over Gloo beside paceline's over shm, for all models.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from step import WORKLOADS, Workload  # beside this file
from torch import nn

ALONE, PEER, OURS = "alone", "torch DDP, gloo", "paceline, shm"

Times = dict[str, float]  # {wrapper: seconds}


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


def measure(rank: int, workload: Workload, options: argparse.Namespace) -> Times:
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


def rank_main(rank: int, world_size: int, folder: str, model: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(threads_of(world_size))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
    )
    times = measure(rank, WORKLOADS[model], options)
    if rank == 0:
        Path(folder, "times").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def threads_of(world_size: int) -> int:
    return max(1, (os.cpu_count() or 1) // world_size)


def run_ranks(world_size: int, model: str, options: argparse.Namespace) -> Times:
    os.environ["OMP_NUM_THREADS"] = str(threads_of(world_size))
    with tempfile.TemporaryDirectory(prefix="paceline-sync-") as folder:
        mp.spawn(rank_main, args=(world_size, folder, model, options), nprocs=world_size)
        times: Times = json.loads(Path(folder, "times").read_text())
    return times


def lines(model: str, times: Times) -> list[str]:
    alone, peer = times[ALONE], times[PEER]
    rows = []
    for name, seconds in times.items():
        row = f"{model:20} {name:16} {seconds * 1e3:>9.2f}"
        if name != ALONE:
            sync = seconds - alone
            row += f" {sync * 1e3:>9.2f} {sync / (peer - alone):>10.2f} {seconds / peer:>10.2f}"
        rows.append(row)
    return rows


def summary(all_times: dict[tuple[int, str], Times]) -> str:
    """torch's DDP over Gloo beside ours over shm: one line for each number of ranks and model."""
    rows = [
        f"{'':26} {'step, ms':^25}  {'synchronisation, ms':^25}",
        f"{'ranks':>5} {'model':20} {'torch':>8} {'paceline':>8} {'ratio':>7}"
        f"  {'torch':>8} {'paceline':>8} {'ratio':>7}",
    ]
    for (world_size, model), times in all_times.items():
        steps = times[PEER], times[OURS]
        syncs = tuple(step - times[ALONE] for step in steps)
        columns = "  ".join(
            f"{peer * 1e3:>8.2f} {ours * 1e3:>8.2f} {ours / peer:>7.2f}" for peer, ours in (steps, syncs)
        )
        rows.append(f"{world_size:>5} {model:20} {columns}")
    return "\n".join(rows)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--model", choices=WORKLOADS, action="append", help="may be given several times")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    all_times: dict[tuple[int, str], Times] = {}
    for world_size in options.ranks:
        print(f"torch {torch.__version__}, {world_size} ranks, {os.cpu_count()} cores")
        print(f"{'':37} {'step, ms':>9} {'sync, ms':>9} {'sync ratio':>10} {'step ratio':>10}", flush=True)
        for model in options.model or WORKLOADS:
            times = all_times[world_size, model] = run_ranks(world_size, model, options)
            print("\n".join(lines(model, times)), flush=True)
        print()
    print(summary(all_times))


if __name__ == "__main__":
    main(sys.argv[1:])
