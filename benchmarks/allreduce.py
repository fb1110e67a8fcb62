"""All-reduce (float32, sum) of the shm process group beside Gloo, and beside MPICH where mpi4py is installed.

    python benchmarks/allreduce.py                            2 ranks, 4 B to 256 MiB
    python benchmarks/allreduce.py --ranks 1 2 4 8 --png docs/img/allreduce.png
    pip install 'paceline[mpi]'                               brings MPICH along

Contenders take turns in the same processes, many short rounds each, so that whatever else the machine does
falls on all of them alike. A round lasts from when its first rank begins until its last one is through, and
follows an untimed run of the same, so that caches hold what the contender leaves there. A time is that of
the quickest round: disturbances only ever add.

    gloo     torch.distributed over TCP loopback
    mpich    MPI_Allreduce, in place, through mpi4py
    staged   shm, any tensor: copied through shared memory in pieces
    arena    shm, a tensor from the group's `allocate_tensor`: reduced in place
    bound    what reducing in place cannot beat. Each rank has to read its slice of every rank's tensor once
             and to write it once, in sum as many bytes as its own tensor has. So: all ranks at once each read
             and write their own tensor once without leaving it, as often in a round as `arena` does. Two
             ways are tried, `x.neg_()` and copying each half of the tensor over the other; the quicker one
             counts. Where ranks outnumber cores it says what these cores can do, if they never had to wait
             for each other. A rank alone has nothing to move, and no bound
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
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
BOUND_FROM = 1 << 20  # bytes; below, calling torch takes longer than moving memory
ROUND_S = 0.004  # how long a round of one contender should take at least: less than a turn of the scheduler
CONTENDERS = ("gloo", "mpich", "staged", "arena")

Times = dict[int, dict[str, float]]  # {bytes: {contender: seconds}}
Run = Callable[[], Any]


def measure(options: argparse.Namespace) -> Times:
    """Seconds per all-reduce; equal on all ranks of the default group."""
    shm, gloo = dist.new_group(backend="shm"), dist.new_group(backend="gloo")
    times: Times = {}
    for size in options.sizes:
        tensor = shm.allocate_tensor(size // 4, dtype=torch.float32, device=torch.device("cpu"))
        plain = torch.zeros(size // 4)
        runs: dict[str, Run] = {
            "gloo": lambda t=plain: dist.all_reduce(t, group=gloo),
            "staged": lambda t=plain: dist.all_reduce(t, group=shm),
            "arena": lambda t=tensor: dist.all_reduce(t, group=shm),
        }
        if options.mpi_rank:
            runs["mpich"] = mpi_all_reduce(plain)
        repeats = {name: agreed_repeats(run, shm) for name, run in runs.items()}
        if size >= BOUND_FROM and dist.get_world_size() > 1:
            runs |= {"negate": tensor.neg_, "swap": copying_halves(tensor)}
            repeats |= dict.fromkeys(("negate", "swap"), repeats["arena"])
        times[size] = quickest(runs, repeats, options.rounds, shm)
        if "negate" in runs:
            times[size]["bound"] = min(times[size].pop("negate"), times[size].pop("swap"))
    return times


def quickest(
    runs: dict[str, Run], repeats: dict[str, int], n_rounds: int, together: dist.ProcessGroup
) -> dict[str, float]:
    """Seconds of one run of each, taking turns."""
    rounds = [[timed(run, repeats[name], together) for name, run in runs.items()] for _ in range(n_rounds)]
    lasted = seconds_of_all_ranks(rounds) / torch.tensor(list(repeats.values()))
    return dict(zip(runs, lasted.min(dim=0).values.tolist(), strict=True))


def agreed_repeats(run: Run, together: dist.ProcessGroup) -> int:
    timed(run, 2, together)
    seconds = seconds_of_all_ranks([[timed(run, 2, together)]]).item() / 2
    return max(1, min(500, int(ROUND_S / seconds)))


def timed(run: Run, repeats: int, together: dist.ProcessGroup) -> tuple[float, float]:
    """When this rank began and ended, on the clock of the host; ranks begin together."""
    run()
    dist.barrier(together)  # of shm: ranks leave it within a microsecond, and one of Gloo's within a hundred
    began = time.clock_gettime(time.CLOCK_MONOTONIC)
    for _ in range(repeats):
        run()
    ended = time.clock_gettime(time.CLOCK_MONOTONIC)
    dist.barrier(together)  # else the first ones through spin in the next contender, and the last get no core
    return began, ended


def seconds_of_all_ranks(rounds: list[list[tuple[float, float]]]) -> Tensor:
    """From the first rank's begin to the last one's end, `[round, contender]`."""
    began, ended = torch.tensor(rounds, dtype=torch.float64).unbind(-1)
    began, ended = began.contiguous(), ended.contiguous()
    dist.all_reduce(began, dist.ReduceOp.MIN)
    dist.all_reduce(ended, dist.ReduceOp.MAX)
    return ended - began


def copying_halves(tensor: Tensor) -> Run:
    one, other = tensor[: tensor.numel() // 2], tensor[-(tensor.numel() // 2) :]

    def swap() -> None:
        other.copy_(one)
        one.copy_(other)

    return swap


def mpi_all_reduce(tensor: Tensor) -> Run:
    from mpi4py import MPI

    buffer = [tensor.numpy(), MPI.FLOAT]
    return lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, buffer)


def rank_main(rank: int, world_size: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
    )
    times = measure(options)
    if rank == 0:
        Path(folder, "times").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(world_size: int, options: argparse.Namespace) -> Times:
    """Under mpiexec if there is MPI to compare with, else forked."""
    with tempfile.TemporaryDirectory(prefix="paceline-allreduce-") as folder:
        mpiexec = Path(sys.executable).with_name("mpiexec")
        if importlib.util.find_spec("mpi4py") and mpiexec.exists():
            arguments = ["--sizes", *map(str, options.sizes), "--rounds", str(options.rounds)]
            command = [str(mpiexec), "-n", str(world_size), sys.executable, __file__, *arguments]
            subprocess.run([*command, "--mpi-rank", folder], check=True)
        else:
            mp.spawn(rank_main, args=(world_size, folder, options), nprocs=world_size)
        return {int(size): row for size, row in json.loads(Path(folder, "times").read_text()).items()}


def as_mpi_rank(options: argparse.Namespace) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank_main(world.Get_rank(), world.Get_size(), options.mpi_rank, options)


def table(times: Times) -> str:
    header = "".join(f"{name + ', us':>12}" for name in CONTENDERS)
    lines = [f"{'bytes':>11}{header}   gloo/staged  gloo/arena  mpich/arena  GiB/s  bound/arena"]
    for size, row in times.items():
        columns = "".join(f"{row[name] * 1e6:>12.1f}" if name in row else f"{'-':>12}" for name in CONTENDERS)
        mpich = f"{row['mpich'] / row['arena']:.1f}" if "mpich" in row else "-"
        bound = f"{row['bound'] / row['arena']:.0%}" if "bound" in row else "-"
        ratios = f"{row['gloo'] / row['staged']:>11.1f}  {row['gloo'] / row['arena']:>10.1f}  {mpich:>11}"
        lines.append(f"{size:>11,}{columns}   {ratios}  {size / row['arena'] / 2**30:>5.1f}  {bound:>11}")
    return "\n".join(lines)


def draw(all_times: dict[int, Times], path: str, title: str) -> None:
    """Bytes of the tensor over time, against size; one panel per number of ranks, if there are several."""
    from matplotlib.figure import Figure

    drawn = {world_size: times for world_size, times in all_times.items() if world_size > 1}
    figure = Figure(figsize=(4.0 * len(drawn), 3.6), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, len(drawn), squeeze=False, sharex=True, sharey=True)[0]
    for axes, (world_size, times) in zip(panels, drawn.items(), strict=True):
        for name in (*CONTENDERS, "bound"):
            points = [(size, size / row[name] / 2**30) for size, row in times.items() if name in row]
            if points:
                style = "--" if name == "bound" else "o-"
                axes.plot(*zip(*points, strict=True), style, markersize=4, label=name)
        axes.set(xscale="log", yscale="log", xlabel="bytes of the tensor", title=f"{world_size} ranks")
        axes.set_xscale("log", base=2)
        axes.set_ylabel("GiB reduced per second")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=90)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="in bytes")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--png", metavar="FILE", help="draw the bandwidth of more than one rank there")
    parser.add_argument("--json", metavar="FILE", help="write the times there too")
    parser.add_argument("--mpi-rank", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.png and max(options.ranks) < 2:
        parser.error("--png takes several ranks: --ranks 2")
    return options


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.mpi_rank:
        as_mpi_rank(options)
        return
    title = f"torch {torch.__version__}, {os.cpu_count()} cores"
    print(title)
    all_times: dict[int, Times] = {}
    for world_size in options.ranks:
        all_times[world_size] = run_ranks(world_size, options)
        print(f"\n{world_size} ranks\n{table(all_times[world_size])}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps({"title": title, "seconds": all_times}, indent=1))
    if options.png:
        draw(all_times, options.png, title)
        print(f"\ndrawn in {options.png}")


if __name__ == "__main__":
    main(sys.argv[1:])
