"""What the Trainer adds to a bare step, beside Hugging Face's Trainer.

    python benchmarks/trainer.py                  one rank
    python benchmarks/trainer.py --ranks 2        ranks of one machine, each way on its own usual backend

On tiny models, so that the step itself takes little. One round runs each of the three in turn, in processes
of its own: a plain loop (forward, backward, clip, step, schedule, zero_grad; with torch's DDP on several
ranks), Hugging Face's Trainer and paceline's, all on the same model, data, optimizer (AdamW) and number of
steps, logging as by default, without checkpoints and evaluations. A step's time is that from one
on_step_begin to the next on rank 0, and of a run's steps the 10th percentile counts, which other load on the
machine hardly changes on one rank. Where ranks outnumber the free cores, each wait for another rank takes a
turn of the scheduler more; so the processor time of rank 0, all its threads together, is printed as well: its
mean over the run's steps. `added` is what a step takes beyond the plain loop's; `ratio` is the median over
rounds of paceline's over Hugging Face's, in brackets the smallest and the largest.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BATCH, STEPS, WARM = 4, 600, 20
WAYS = ("plain", "theirs", "ours")
MARK = "step times: "
MEASURES = ("time", "processor time")


class Marks:
    """When steps began, in seconds: on the clock, and in this process's processor time."""

    def __init__(self) -> None:
        self.clock: list[float] = []
        self.processor: list[float] = []

    def add(self) -> None:
        """A step begins."""
        self.clock.append(time.perf_counter())
        self.processor.append(time.process_time())

    def microseconds(self) -> dict[str, float]:
        """What a step takes, of each of MEASURES."""
        steps = [after - before for before, after in itertools.pairwise(self.clock[WARM:])]
        processor = (self.processor[-1] - self.processor[WARM]) / len(steps)
        return {"time": 1e6 * statistics.quantiles(steps, n=10)[0], "processor time": 1e6 * processor}


class Perceptron(nn.Module):
    """Two small layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layers(x).squeeze(-1) - labels).square().mean()}


class Blocks(nn.Module):
    """Two small transformer blocks."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.blocks(x.unsqueeze(1)).squeeze(1)
        return {"loss": (self.head(hidden).squeeze(-1) - labels).square().mean()}


def samples(count: int) -> list[dict[str, Tensor]]:
    """Points with a number to predict."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(count, 8, generator=generator)
    return [{"x": point, "labels": point.sum()} for point in points]


MODELS = (Perceptron, Blocks)


def plainly(model: nn.Module, marks: Marks) -> None:
    """The bare step, with batches that lie ready."""
    batch = {name: torch.stack([each[name] for each in samples(BATCH)]) for name in ("x", "labels")}
    trained: nn.Module = model
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        trained = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    for _ in range(STEPS):
        marks.add()
        trained(**batch)["loss"].backward()
        nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def with_trainer(library: Any, model: nn.Module, marks: Marks) -> None:
    """The same number of steps by a Trainer: transformers' or paceline's."""

    class Begins(library.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            marks.add()

    ranks = int(os.environ.get("WORLD_SIZE", 1))
    with tempfile.TemporaryDirectory() as folder:
        args = library.TrainingArguments(
            output_dir=folder, use_cpu=True, disable_tqdm=True, report_to="none", save_strategy="no",
            max_steps=STEPS, per_device_train_batch_size=BATCH, optim="adamw_torch", learning_rate=1e-3,
        )  # fmt: skip
        library.Trainer(
            model=model, args=args, train_dataset=samples(BATCH * STEPS * ranks), callbacks=[Begins()]
        ).train()


def run_way(way: str) -> None:
    """In a child: train each model, and print the microseconds of a step."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    found = {}
    for model_class in MODELS:
        torch.manual_seed(0)
        marks = Marks()
        with contextlib.redirect_stdout(sys.stderr):
            if way == "plain":
                plainly(model_class(), marks)
            elif way == "theirs":
                with_trainer(__import__("transformers"), model_class(), marks)
            else:
                with_trainer(__import__("paceline"), model_class(), marks)
        found[model_class.__name__] = marks.microseconds()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
    if int(os.environ.get("RANK", 0)) == 0:
        print(MARK + json.dumps(found), flush=True)


def measure(way: str, ranks: int) -> dict[str, dict[str, float]]:
    """Microseconds of a step of each model in each measure, from a child."""
    script = [__file__, "--way", way]
    if ranks > 1:
        script = ["-m", "paceline", "launch", "--cpu", "--num_processes", str(ranks), *script]
    child = subprocess.run([sys.executable, *script], capture_output=True, text=True, timeout=600)
    lines = [line.partition(MARK)[2] for line in child.stdout.splitlines() if MARK in line]
    if child.returncode or not lines:
        sys.exit(f"{way} failed with exit code {child.returncode}:\n{child.stderr[-2000:]}")
    times: dict[str, dict[str, float]] = json.loads(lines[0])
    return times


def main() -> None:
    """Compare on both models."""
    parser = argparse.ArgumentParser(
        description="What the Trainer adds to a bare step, beside Hugging Face's."
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        run_way(options.way)
        return
    rounds = [{way: measure(way, options.ranks) for way in WAYS} for _ in range(options.rounds)]
    for name in (each.__name__ for each in MODELS):
        for measured in MEASURES:
            report(name, measured, [{way: each[way][name][measured] for way in WAYS} for each in rounds])


def report(name: str, measured: str, rounds: list[dict[str, float]]) -> None:
    """Print the line of one model in one measure."""
    plain, theirs, ours = (statistics.median(each[way] for each in rounds) for way in WAYS)
    ratios = sorted((each["ours"] - each["plain"]) / (each["theirs"] - each["plain"]) for each in rounds)
    print(
        f"{name:10}  {measured:14}  plain {plain:6.0f} us   added by Hugging Face {theirs - plain:6.0f} us   "
        f"added by paceline {ours - plain:6.0f} us   "
        f"ratio {statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]"
    )


if __name__ == "__main__":
    main()
