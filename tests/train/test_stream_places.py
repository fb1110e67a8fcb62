"""A stream that can say where its reading stands is resumed there at once, with the very same samples."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from paceline.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.models import Points, Regression, losses, settings, weights

SAMPLES = 21  # six steps of four


class Knowing(IterableDataset[Any]):
    """Points with noise, drawn from three generators while they are read; says where it stands."""

    def __init__(self) -> None:
        self.points, self.reads, self.next, self.more = Points(SAMPLES), 0, 0, {}

    def __iter__(self) -> Iterator[Any]:
        first, self.next = self.next, 0
        for index in range(first, SAMPLES):
            self.reads, self.next = self.reads + 1, index + 1
            noise = random.random() + np.random.rand() + float(torch.rand(()))
            yield {"x": self.points[index]["x"] * noise, "labels": self.points[index]["labels"]}
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, **self.more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def trainer_of(folder: Path, stream: Any, **changes: Any) -> Trainer:
    values = {"max_steps": 11, "save_strategy": "steps", "save_steps": 1, **changes}
    return Trainer(Regression(dropout=0.2), settings(folder, **values), train_dataset=stream)


@pytest.mark.parametrize(("step", "left"), [(2, 13), (5, 1), (6, 0), (8, 13 - SAMPLES)])
def test_no_sample_is_read_again_and_the_run_is_the_same(tmp_path: Path, step: int, left: int) -> None:
    whole = trainer_of(tmp_path, Knowing())
    whole.train()
    stream = Knowing()
    again = trainer_of(tmp_path, stream)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert losses(again) == losses(whole)
    for name, value in weights(whole.model).items():
        assert torch.equal(weights(again.model)[name], value)
    of_last_epoch = 20  # five of its steps
    assert stream.reads == left + of_last_epoch


def resume_on_two(rank: int, world_size: int, folder: Path) -> tuple[list[float], int]:
    stream = Knowing()
    args = settings(folder, max_steps=11, per_device_train_batch_size=2)
    trainer = Trainer(Regression(), args, train_dataset=stream)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return losses(trainer), stream.reads


def test_on_another_number_of_ranks(tmp_path: Path) -> None:
    args = settings(tmp_path, max_steps=11, save_strategy="steps", save_steps=2)
    whole = Trainer(Regression(), args, train_dataset=Knowing())
    whole.train()
    for found, reads in run_ranks(resume_on_two, 2, tmp_path):
        assert found == pytest.approx(losses(whole), rel=1e-5)
        assert reads == 13 + 20


def test_workers_read_up_to_the_place(tmp_path: Path) -> None:
    whole = trainer_of(tmp_path, Knowing(), dataloader_num_workers=2)
    whole.train()
    assert not (tmp_path / "checkpoint-2" / "stream.pt").exists()
    again = trainer_of(tmp_path, Knowing(), dataloader_num_workers=2)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(again) == losses(whole)


def test_a_state_that_is_more_than_plain_values_is_not_trusted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = Knowing()
    stream.more = {"odd": Path("here")}
    whole = trainer_of(tmp_path, stream)
    whole.train()
    again = trainer_of(tmp_path, Knowing())
    with caplog.at_level(logging.WARNING, logger="paceline"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "stream.pt holds more than plain values" in caplog.text
    assert losses(again) == losses(whole)


class Counted:
    """A mapped function that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        self.calls += 1
        return {"x": [2 * each for each in row["x"]]}


@pytest.mark.parametrize("shuffled", [False, True])
def test_streams_of_datasets(tmp_path: Path, shuffled: bool) -> None:
    """One with a shuffle buffer, whose state leaves out what the buffer holds, is read again."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": Points(SAMPLES).x.tolist(), "labels": Points(SAMPLES).y.tolist()})

    def stream(function: Counted) -> Any:
        flow = rows.to_iterable_dataset(num_shards=3).map(function)
        return flow.shuffle(seed=1, buffer_size=4) if shuffled else flow

    whole, function = trainer_of(tmp_path, stream(Counted())), Counted()
    whole.train()
    assert (tmp_path / "checkpoint-8" / "stream.pt").exists() is not shuffled
    again = trainer_of(tmp_path, stream(function))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert losses(again) == losses(whole)
    same: dict[str, Tensor] = weights(whole.model)
    assert all(torch.equal(value, same[name]) for name, value in weights(again.model).items())
    assert function.calls < 20 or shuffled
