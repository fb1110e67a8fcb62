"""Losses and weights do not depend on how a global batch is divided.

The right values come from a plain loop in one process over the joined batches.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.train.orders import EpochOrder
from paceline.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.models import (
    CountingTagger,
    KeywordTagger,
    Points,
    Regression,
    Sequences,
    Tagger,
    losses,
    settings,
    weights,
)

# Ranks, samples of a micro-batch, micro-batches: always 8 samples a step.
LAYOUTS = [(1, 8, 1), (1, 2, 4), (2, 4, 1), (2, 2, 2), (4, 2, 1), (4, 1, 2)]

# 21 samples: the third step of an epoch has five, which neither 2 nor 4 ranks share evenly, and
# at 17 one, so that all ranks but one have none.
CASES: dict[str, tuple[type[nn.Module], Any]] = {
    "regression of 21": (Regression, Points(21)),
    "regression of 17": (Regression, Points(17)),
    "tokens, mean": (Tagger, Sequences(21)),
    "tokens, mean, of 17": (Tagger, Sequences(17)),
    "tokens, told the number of items": (CountingTagger, Sequences(21)),
    "tokens, kwargs that are not used": (KeywordTagger, Sequences(21)),
}


def train_all(rank: int, world_size: int, folder: Path, layouts: list[tuple[int, int]]) -> dict[Any, Any]:
    """Every case in every layout of this world size: losses and final weights."""
    results = {}
    for per_rank, accumulation in layouts:
        for name, (model_class, dataset) in CASES.items():
            model = model_class()
            args = settings(
                folder,
                num_train_epochs=2,
                per_device_train_batch_size=per_rank,
                gradient_accumulation_steps=accumulation,
                max_grad_norm=1.0,
            )
            trainer = Trainer(model, args, train_dataset=dataset)
            trainer.train()
            results[name, per_rank, accumulation] = (losses(trainer), weights(model))
    return results


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """world size -> what its ranks report; they start when a world size is first asked for."""

    @cache
    def of(world_size: int) -> list[dict[Any, Any]]:
        layouts = [layout[1:] for layout in LAYOUTS if layout[0] == world_size]
        folder = tmp_path_factory.mktemp(f"world{world_size}")
        return run_ranks(train_all, world_size, folder, layouts, backend=None, timeout=90)

    return of


def alone(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """The same training as a plain loop over batches of 8."""
    model_class, dataset = CASES[name]
    model = model_class()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for epoch in range(2):
        order = EpochOrder(len(dataset), seed=7)
        order.set_epoch(epoch)
        indices = list(order)
        for start in range(0, len(indices), 8):
            samples = [dataset[index] for index in indices[start : start + 8]]
            batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
            optimizer.zero_grad()
            loss = model(**batch)["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    return losses, weights(model)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "{} ranks x {} x {}".format(*layout))
def test_equals_one_process(trained: Any, name: str, layout: tuple[int, int, int]) -> None:
    want_losses, want_weights = alone(name)
    for logged, final in (report[name, *layout[1:]] for report in trained(layout[0])):
        assert logged == pytest.approx(want_losses, rel=1e-5)
        for key, value in want_weights.items():
            torch.testing.assert_close(final[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout[0] > 1], ids=str)
def test_replicas_are_bit_identical(trained: Any, layout: tuple[int, int, int]) -> None:
    first, *others = trained(layout[0])
    for name in CASES:
        for other in others:
            for key, value in first[name, *layout[1:]][1].items():
                assert torch.equal(other[name, *layout[1:]][1][key], value)
