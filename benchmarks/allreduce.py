"""All-reduce bandwidth of the shm process group beside Gloo, and beside MPICH where mpi4py is installed.

    python benchmarks/allreduce.py                            2 ranks, 4 B to 256 MiB
    python benchmarks/allreduce.py --ranks 4 --png allreduce.png --json allreduce.json
    mpiexec -n 2 python benchmarks/allreduce.py --mpi         MPICH's column, in MPI's own process layout

Contenders take turns in the same processes, so that whatever else the machine does falls on all of them. A
time is the median over rounds, each of enough all-reduces (float32, sum) to be measured, of the slowest rank.

    arena    the tensor came from the group's `allocate_tensor`: reduced in place
    staged   any other tensor: copied through shared memory in pieces
    bound    what in-place reduction cannot beat: each rank reads its slice of every rank's tensor and writes
             it to every rank's, at the speed at which all ranks together copy memory (read one, write one),
             measured in between
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

SIZES = [4, 64, 1 << 10, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20, 256 << 20]
CONTENDERS = ("gloo", "staged", "arena")
ROUND_S = 0.05  # how long a round of one contender should take at least


def measure(rank: int, options: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Seconds per all-reduce, `{bytes: {contender: seconds}}`; equal on all ranks."""
    from paceline.comm.registration import register

    register()
    shm, gloo = dist.new_group(backend="shm"), dist.new_group(backend="gloo")
    times: dict[int, dict[str, float]] = {}
    for size in options.sizes:
        numel = size // 4
        arena = shm.allocate_tensor(numel, dtype=torch.float32, device=torch.device("cpu"))
        tensors = {"gloo": torch.zeros(numel), "staged": torch.zeros(numel), "arena": arena}
        runs: dict[str, Callable[[], Any]] = {
            "gloo": lambda t=tensors["gloo"]: dist.all_reduce(t, group=gloo),
            "staged": lambda t=tensors["staged"]: dist.all_reduce(t, group=shm),
            "arena": lambda t=tensors["arena"]: dist.all_reduce(t, group=shm),
        }
        if size >= 1 << 20:
            runs["bound"] = copying(tensors["gloo"], tensors["staged"], options.ranks)
        repeats = {name: agreed_repeats(run, options.ranks) for name, run in runs.items()}
        rounds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.rounds):
            for name, run in runs.items():
                rounds[name].append(timed(run, repeats[name]))
        slowest = torch.tensor([rounds[name] for name in runs], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times[size] = dict(zip(runs, slowest.median(dim=1).values.tolist(), strict=True))
    return times


def copying(source: Tensor, target: Tensor, ranks: int) -> Callable[[], Any]:
    """Copies as many bytes as one rank reads in an in-place all-reduce: its slice of every rank's tensor.

    It also writes as many, since it writes its slice to every rank's tensor.
    """
    numel = source.numel() // ranks * ranks
    return lambda: target[:numel].copy_(source[:numel])


def agreed_repeats(run: Callable[[], Any], ranks: int) -> int:
    for _ in range(3):
        run()
    one = torch.tensor(timed(run, 3), dtype=torch.float64)
    dist.all_reduce(one)
    return max(2, min(500, int(ROUND_S * ranks / one.item())))


def timed(run: Callable[[], Any], repeats: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - began) / repeats


def rank_main(rank: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=options.ranks)
    times = measure(rank, options)
    if rank == 0:
        Path(folder, "result").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def measure_mpi(options: argparse.Namespace) -> dict[int, dict[str, float]]:
    """MPI's in-place all-reduce, in processes that mpiexec started."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    times = {}
    for size in options.sizes:
        value = np.zeros(size // 4, dtype=np.float32)

        def run(value: Any = value) -> None:
            world.Allreduce(MPI.IN_PLACE, value)

        for _ in range(3):
            run()
        began = time.perf_counter()
        run()
        repeats = max(2, min(500, int(ROUND_S / world.allreduce(time.perf_counter() - began, MPI.MAX))))
        rounds = []
        for _ in range(options.rounds):
            world.Barrier()
            began = time.perf_counter()
            for _ in range(repeats):
                run()
            rounds.append(world.allreduce((time.perf_counter() - began) / repeats, MPI.MAX))
        times[size] = {"mpi": statistics.median(rounds)}
    return times


def table(times: dict[int, dict[str, float]]) -> str:
    lines = [
        f"{'bytes':>12} {'gloo, us':>10} {'staged, us':>10} {'arena, us':>10}"
        f" {'gloo/staged':>11} {'gloo/arena':>10} {'GiB/s':>6} {'bound/arena':>11}"
    ]
    for size, row in times.items():
        bound = f"{row['bound'] / row['arena']:>10.0%}" if "bound" in row else ""
        lines.append(
            f"{size:>12,} "
            + " ".join(f"{row[name] * 1e6:>10.1f}" for name in CONTENDERS)
            + f" {row['gloo'] / row['staged']:>11.1f} {row['gloo'] / row['arena']:>10.1f}"
            + f" {size / row['arena'] / 2**30:>6.1f} {bound:>11}"
        )
    return "\n".join(lines)


def draw(times: dict[int, dict[str, float]], path: str, title: str) -> None:
    """Bytes of the tensor over time, against size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    names = [name for name in (*CONTENDERS, "mpi", "bound") if any(name in row for row in times.values())]
    for name in names:
        points = [(size, size / row[name] / 2**30) for size, row in times.items() if name in row]
        axes.plot(
            *zip(*points, strict=True), marker="o", label=name, linestyle="--" if name == "bound" else "-"
        )
    axes.set(
        xscale="log", yscale="log", xlabel="bytes of the tensor", ylabel="GiB reduced per second", title=title
    )
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="in bytes")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mpi", action="store_true", help="measure MPI instead, under mpiexec")
    parser.add_argument("--png", metavar="FILE", help="draw the bandwidth there")
    parser.add_argument("--json", metavar="FILE", help="write the times there too")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.mpi:
        for size, row in measure_mpi(options).items():
            print(f"{size:>12,} {row['mpi'] * 1e6:>10.1f} us", flush=True)
        return
    title = f"torch {torch.__version__}, {options.ranks} ranks, {os.cpu_count()} cores"
    print(title)
    with tempfile.TemporaryDirectory(prefix="paceline-allreduce-") as folder:
        mp.spawn(rank_main, args=(folder, options), nprocs=options.ranks)
        times = {int(size): row for size, row in json.loads(Path(folder, "result").read_text()).items()}
    print(table(times))
    if options.json:
        Path(options.json).write_text(json.dumps({"title": title, "seconds": times}, indent=1))
    if options.png:
        draw(times, options.png, title)


if __name__ == "__main__":
    main(sys.argv[1:])
