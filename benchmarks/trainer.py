"""What the Trainer adds to a bare step, beside Hugging Face's Trainer.

    python benchmarks/trainer.py                  one rank
    python benchmarks/trainer.py --rounds 9

On tiny models, so that the step itself takes little. One round trains each of the three, in turn and in
the same process: a plain loop (forward, backward, clip, step, schedule, zero_grad), Hugging Face's Trainer
and paceline's, all on the same model, data, optimizer (AdamW) and number of steps, without logs, checkpoints
and evaluations. A step's time is (time of the long run - time of the short run) / (difference in steps), so
that what comes once, before the first step and after the last, is left out. Time is the process's processor
time, which other load on the machine hardly changes; `--wall` takes the clock on the wall. `added` is a
step's time less the plain loop's; `ratio` is the median over rounds of paceline's over Hugging Face's, in
brackets its quartiles.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 4
SHORT, LONG = 20, 120  # steps


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


def train_plainly(model: nn.Module, steps: int, folder: str) -> None:
    """The bare step, with batches that lie ready."""
    batch = {name: torch.stack([each[name] for each in samples(BATCH)]) for name in ("x", "labels")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for _ in range(steps):
        model(**batch)["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def train_with(trainer_class: Any, arguments_class: Any) -> Callable[[nn.Module, int, str], None]:
    """A function that trains with one of the two Trainers."""

    def train(model: nn.Module, steps: int, folder: str) -> None:
        args = arguments_class(
            output_dir=folder, use_cpu=True, disable_tqdm=True, report_to="none", save_strategy="no",
            logging_strategy="no", max_steps=steps, per_device_train_batch_size=BATCH, optim="adamw_torch",
            learning_rate=1e-3,
        )  # fmt: skip
        trainer_class(model=model, args=args, train_dataset=samples(BATCH * LONG)).train()

    return train


def seconds_per_step(
    train: Callable[[nn.Module, int, str], None], model_class: type[nn.Module], clock: Callable[[], float]
) -> float:
    """Of a long run, beyond a short one."""
    taken = []
    for steps in (SHORT, LONG):
        torch.manual_seed(0)
        model = model_class()
        with tempfile.TemporaryDirectory() as folder:
            began = clock()
            train(model, steps, folder)
            taken.append(clock() - began)
    return (taken[1] - taken[0]) / (LONG - SHORT)


def compare(model_class: type[nn.Module], rounds: int, clock: Callable[[], float]) -> None:
    """Print one line of the table."""
    import transformers

    import paceline

    ways = {
        "plain": train_plainly,
        "theirs": train_with(transformers.Trainer, transformers.TrainingArguments),
        "ours": train_with(paceline.Trainer, paceline.TrainingArguments),
    }
    for way in ways.values():  # imports, caches
        seconds_per_step(way, model_class, clock)
    found = [
        {name: seconds_per_step(way, model_class, clock) for name, way in ways.items()} for _ in range(rounds)
    ]
    added = {name: [each[name] - each["plain"] for each in found] for name in ("theirs", "ours")}
    ratios = [ours / theirs for ours, theirs in zip(added["ours"], added["theirs"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    plain, theirs, ours = (
        1e3 * statistics.median(values)
        for values in ([each["plain"] for each in found], added["theirs"], added["ours"])
    )
    print(
        f"{model_class.__name__:12} plain {plain:6.2f} ms   added by Hugging Face {theirs:6.2f} ms   "
        f"added by paceline {ours:6.2f} ms   ratio {middle:.2f} [{low:.2f}, {high:.2f}]",
        flush=True,
    )


def main() -> None:
    """Compare on both models."""
    parser = argparse.ArgumentParser(
        description="What the Trainer adds to a bare step, beside Hugging Face's."
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--wall", action="store_true", help="the clock on the wall instead of processor time")
    options = parser.parse_args()
    clock = time.perf_counter if options.wall else time.process_time
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for model_class in (Perceptron, Blocks):
        compare(model_class, options.rounds, clock)


if __name__ == "__main__":
    main()
