"""Step time and gradient memory beside torch's DistributedDataParallel.

    python benchmarks/step.py                      2 ranks, gloo
    python benchmarks/step.py --ranks 4 --model transformer --rounds 60
    python benchmarks/step.py --backend shm --torch-backend gloo

Both wrappers train a copy of the same model in the same processes. One round is a step of torch's, two of
paceline's, one of torch's, so that whatever else the machine does in that time falls on both. A step is
forward, backward, optimizer (SGD) and zero_grad; the ranks start it together, and its time is that of the
slowest rank. `ratio` is the median of paceline's steps over the median of torch's; in brackets the quartiles
of the ratios of single rounds.

`held` is what wrapping and three steps add to a rank's memory (proportional set size, so that pages shared
between ranks count once) while the gradients of the last one are there, over the bytes of the parameters:
1.0 is the gradients themselves. Measured in processes of their own, for models large enough to stand out.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import importlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

TORCH = "torch.nn.parallel:DistributedDataParallel"
PACELINE = "paceline:DistributedDataParallel"
SMALLEST_MEASURED = 4 << 20  # bytes of parameters below which allocator and interpreter noise would show


# ---------------------------------------------------------------------------------------------------------
# The models: each a shape that stresses another part of a wrapper
# ---------------------------------------------------------------------------------------------------------
class TransformerStack(nn.Module):
    """Four encoder blocks and a classifier on the mean token."""

    def __init__(self, width: int = 256, blocks: int = 4) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean(dim=1))


class EmbeddingHeavy(nn.Module):
    """Nearly all parameters in one table, little arithmetic."""

    def __init__(self, rows: int = 60_000, width: int = 64) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x).mean(dim=1))


class ManySmallTensors(nn.Module):
    """2,000 parameters of 64 elements: the cost per parameter."""

    def __init__(self, count: int = 2_000, width: int = 64) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(count))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        return self.head(x)


def wide_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(1024, 1536), nn.ReLU(), nn.Linear(1536, 1536), nn.ReLU(), nn.Linear(1536, 10)
    )


def deep_mlp() -> nn.Module:
    layers = [layer for _ in range(64) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def conv_net() -> nn.Module:
    widths = [3, 32, 64, 128]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))


@dataclass(frozen=True)
class Workload:
    """A model and the input of one rank's step."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]


WORKLOADS = {
    "wide mlp": Workload(wide_mlp, lambda: torch.randn(32, 1024)),
    "deep narrow mlp": Workload(deep_mlp, lambda: torch.randn(32, 64)),
    "conv net": Workload(conv_net, lambda: torch.randn(16, 3, 32, 32)),
    "transformer": Workload(TransformerStack, lambda: torch.randn(8, 32, 256)),
    "embedding": Workload(EmbeddingHeavy, lambda: torch.randint(60_000, (32, 16))),
    "2000 small tensors": Workload(ManySmallTensors, lambda: torch.randn(8, 64)),
}


@dataclass
class Row:
    """One line of the table; times in seconds, memory in multiples of the parameters' bytes."""

    model: str
    parameters: int
    torch_step: float
    paceline_step: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    torch_held: float | None = None
    paceline_held: float | None = None


# ---------------------------------------------------------------------------------------------------------
# In a rank
# ---------------------------------------------------------------------------------------------------------
class Contender:
    """One wrapper around its own copy of the model, with its optimizer."""

    def __init__(self, model: nn.Module, wrapper: Callable[[nn.Module], nn.Module]) -> None:
        self.module = wrapper(model)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3)

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        nn.functional.cross_entropy(self.module(inputs), targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed_step(self, inputs: Tensor, targets: Tensor) -> float:
        dist.barrier()
        began = time.perf_counter()
        self.step(inputs, targets)
        return time.perf_counter() - began


def measure_time(rank: int, workload: Workload, options: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Step times of both wrappers, `{name: [round][first, second]}`, of the slowest rank."""
    torch.manual_seed(0)
    model = workload.build()
    torch.manual_seed(1 + rank)
    inputs = workload.inputs()
    targets = torch.randint(10, (len(inputs),))
    theirs = Contender(copy.deepcopy(model), wrapper_of(TORCH, options))
    ours = Contender(copy.deepcopy(model), wrapper_of(options.ddp, options))
    for _ in range(options.warmup):
        for contender in (theirs, ours):
            contender.step(inputs, targets)
    times: dict[str, list[list[float]]] = {"torch": [], "paceline": []}
    gc.collect()
    gc.disable()
    for _ in range(options.rounds):
        first, second, third, fourth = (c.timed_step(inputs, targets) for c in (theirs, ours, ours, theirs))
        times["torch"].append([first, fourth])
        times["paceline"].append([second, third])
    gc.enable()
    for name, own in times.items():
        slowest = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times[name] = slowest.tolist()
    return times


def measure_memory(rank: int, workload: Workload, spec: str, options: argparse.Namespace) -> float:
    """Bytes that wrapping and three steps add while the last gradients are there; mean over the ranks."""
    torch.manual_seed(rank)
    model, inputs = workload.build(), workload.inputs()
    targets = torch.randint(10, (len(inputs),))
    # What a first backward, a first wrapper and a first collective set up belongs to nobody's gradients.
    nn.functional.cross_entropy(model(inputs), targets).backward()
    model.zero_grad()
    wrapper_of(spec, options)(nn.Linear(4, 4))(torch.ones(1, 4)).sum().backward()
    dist.all_reduce(torch.zeros(1 << 20))
    before = resident_bytes()
    module = wrapper_of(spec, options)(model)
    for _ in range(3):
        module.zero_grad()
        nn.functional.cross_entropy(module(inputs), targets).backward()
    held = torch.tensor(float(resident_bytes() - before))
    dist.all_reduce(held)
    return held.item() / dist.get_world_size()


def wrapper_of(spec: str, options: argparse.Namespace) -> Callable[[nn.Module], nn.Module]:
    """The constructor named by `module:attribute`; torch's takes bucket views if asked for."""
    module, _, attribute = spec.partition(":")
    cls = getattr(importlib.import_module(module), attribute)
    if spec != TORCH:
        return lambda model: cls(model)
    group = dist.new_group(backend=options.torch_backend) if options.torch_backend else None
    views = options.torch_bucket_views
    return lambda model: cls(model, process_group=group, gradient_as_bucket_view=views)


def resident_bytes() -> int:
    """Proportional set size of this process without files' pages, after freed memory went back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    kibibytes = 0
    for entry in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if entry.startswith(("Pss_Anon:", "Pss_Shmem:")):
            kibibytes += int(entry.split()[1])
    dist.barrier()
    return kibibytes * 1024


def rank_main(rank: int, folder: str, task: tuple[Any, ...], options: argparse.Namespace) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    dist.init_process_group(
        options.backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=options.ranks
    )
    name, spec = task
    workload = WORKLOADS[name]
    result: Any
    if spec is None:
        result = measure_time(rank, workload, options)
    else:
        result = measure_memory(rank, workload, spec, options)
    if rank == 0:
        Path(folder, "result").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------
# In the parent
# ---------------------------------------------------------------------------------------------------------
def run(name: str, spec: str | None, options: argparse.Namespace) -> Any:
    """Starts the ranks for one measurement: of time when `spec` is None, else of that wrapper's memory."""
    with tempfile.TemporaryDirectory(prefix="paceline-step-") as folder:
        mp.spawn(rank_main, args=(folder, (name, spec), options), nprocs=options.ranks)
        return json.loads(Path(folder, "result").read_text())


def measure(name: str, options: argparse.Namespace) -> Row:
    parameters = list(WORKLOADS[name].build().parameters())
    times = run(name, None, options)
    rounds = [sum(ours) / sum(theirs) for ours, theirs in zip(times["paceline"], times["torch"], strict=True)]
    low, _, high = statistics.quantiles(rounds, n=4)
    medians = {who: statistics.median(t for both in own for t in both) for who, own in times.items()}
    row = Row(
        model=name,
        parameters=sum(p.numel() for p in parameters),
        torch_step=medians["torch"],
        paceline_step=medians["paceline"],
        ratio=medians["paceline"] / medians["torch"],
        ratio_quartiles=(low, high),
    )
    size = sum(p.numel() * p.element_size() for p in parameters)
    if not options.no_memory and size >= SMALLEST_MEASURED:
        row.torch_held = run(name, TORCH, options) / size
        row.paceline_held = run(name, options.ddp, options) / size
    return row


def line(row: Row) -> str:
    held = ["-" if value is None else f"{value:.2f}" for value in (row.torch_held, row.paceline_held)]
    low, high = row.ratio_quartiles
    return (
        f"{row.model:20} {row.parameters:>10,} {row.torch_step * 1e3:>9.2f} {row.paceline_step * 1e3:>9.2f}"
        f"   {row.ratio:.2f} [{low:.2f} - {high:.2f}]   {held[0]:>6} {held[1]:>9}"
    )


def served_by(options: argparse.Namespace) -> str:
    return options.backend + (f" (torch: {options.torch_backend})" if options.torch_backend else "")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--rounds", type=int, default=40, help="of four steps each, after the warm-up")
    parser.add_argument("--warmup", type=int, default=6, help="steps of each wrapper that are not counted")
    parser.add_argument(
        "--model", action="append", choices=sorted(WORKLOADS), help="repeatable; default: all"
    )
    parser.add_argument(
        "--torch-bucket-views", action="store_true", help="torch's with gradient_as_bucket_view"
    )
    parser.add_argument("--torch-backend", metavar="NAME", help="of torch's wrapper; default: --backend")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument(
        "--ddp", default=PACELINE, metavar="MODULE:CLASS", help="what stands beside torch's class"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.ranks)))
    # Blocks go back to the system when freed, so that resident memory is what is held.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
    print(f"torch {torch.__version__}, {options.ranks} ranks, {served_by(options)}, {os.cpu_count()} cores")
    print(f"{'':20} {'':>10} {'step, ms':^19}   {'paceline / torch':18}   {'held / parameters':>16}")
    columns = f"{'torch':>9} {'paceline':>9}   {'ratio [quartiles]':18}   {'torch':>6} {'paceline':>9}"
    print(f"{'model':20} {'parameters':>10} {columns}")
    rows = []
    for name in options.model or WORKLOADS:
        rows.append(measure(name, options))
        print(line(rows[-1]), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
