"""Means over each rank's own items, and batches in the order in which workers have them ready."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.models import CountingTagger, Points, Regression, Sequences, Tagger, settings, weights

MODELS = {"mean": Tagger, "sum / count": CountingTagger}


def train_on_own_means(rank: int, world_size: int, folder: Path, kind: str, size: int) -> dict[str, Tensor]:
    args = settings(
        folder, average_tokens_across_devices=False, gradient_accumulation_steps=2, max_steps=1,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = Trainer(MODELS[kind](), args, train_dataset=Sequences(size))
    trainer.train()
    return weights(trainer.model)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("size", [16, 9])
def test_each_rank_averages_over_its_own_items(tmp_path: Path, kind: str, size: int) -> None:
    """The step is that of the mean, over ranks, of the means over each rank's labels."""
    parts = {
        16: [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]],
        9: [[0, 1, 2, 3, 8], [4, 5, 6, 7]],
    }
    data, model = Sequences(size), Tagger()
    total = torch.zeros(())
    for own in parts[size]:
        logits = model(data.tokens[own])["logits"]
        total = total + nn.functional.cross_entropy(logits.flatten(0, 1), data.labels[own].flatten()) / 2
    total.backward()
    for found in run_ranks(train_on_own_means, 2, tmp_path, kind, size):
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(found[name], parameter.detach() - 0.1 * parameter.grad)


def train_on_own_samples(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    args = settings(
        folder, average_tokens_across_devices=False, max_steps=1, train_sampling_strategy="sequential"
    )
    trainer = Trainer(Regression(), args, train_dataset=Points(5))
    trainer.train()
    return weights(trainer.model)


def test_samples_are_averaged_likewise(tmp_path: Path) -> None:
    data, model = Points(5), Regression()
    (model(data.x[:3], data.y[:3])["loss"] / 2 + model(data.x[3:], data.y[3:])["loss"] / 2).backward()
    for found in run_ranks(train_on_own_samples, 2, tmp_path):
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(found[name], parameter.detach() - 0.1 * parameter.grad)


class Numbered(Points):
    """Says which sample is which; the first of each rank waits until another batch has been trained on."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.trained = multiprocessing.get_context("fork").Event()

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index in (0, 2):
            self.trained.wait(20)
        return {**super().__getitem__(index), "number": torch.tensor(index)}


class Noting(Regression):
    def __init__(self, trained: Any) -> None:
        super().__init__()
        self.trained, self.seen = trained, list[list[int]]()

    def forward(self, x: Tensor, labels: Tensor, number: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        self.trained.set()
        self.seen.append(number.tolist())
        return super().forward(x, labels)


def train_unordered(rank: int, world_size: int, folder: Path) -> tuple[list[list[int]], int]:
    args = settings(
        folder, dataloader_in_order=False, dataloader_num_workers=2, per_device_train_batch_size=2,
        dataloader_multiprocessing_context="fork", num_train_epochs=1, train_sampling_strategy="sequential",
    )  # fmt: skip
    data = Numbered(23)
    trainer = Trainer(Noting(data.trained), args, train_dataset=data)
    return trainer.model.seen, trainer.train().global_step


def test_the_first_batch_that_is_ready_is_next_and_every_sample_comes_once(tmp_path: Path) -> None:
    results = run_ranks(train_unordered, 2, tmp_path)
    seen = [batch for batches, _ in results for batch in batches]
    assert sorted(number for batch in seen for number in batch) == list(range(23))
    assert all(batches[0] != first for (batches, _), first in zip(results, ([0, 1], [2, 3]), strict=True))
    assert [steps for _, steps in results] == [6, 6]
