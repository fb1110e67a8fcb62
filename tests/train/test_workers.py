"""Processes that load data: they end with training, and evaluations keep their order whatever their speed."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from paceline.train.trainer import Trainer
from tests.train.models import Points, Regression, settings


class Flow(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        points = Points(30)
        return (points[index] for index in range(len(points)))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("data", [Points(30), Flow()])
def test_they_end_with_training(tmp_path: Path, data: Any, persistent: bool) -> None:
    """Also where the last epoch is not read to its end; the collector would wait five seconds for each."""
    before = set(multiprocessing.active_children())
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": persistent}
    args = settings(tmp_path, max_steps=3, eval_strategy="steps", eval_steps=2, **workers)
    trainer = Trainer(Regression(), args, train_dataset=data, eval_dataset=data)
    trainer.train()
    assert set(multiprocessing.active_children()) <= before


class SlowAtFirst(Points):
    """Whoever reads the first samples is overtaken by the next."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.3 if index < 2 else 0)
        return super().__getitem__(index)


def test_predictions_stand_in_the_order_of_the_data(tmp_path: Path) -> None:
    args = settings(
        tmp_path, per_device_eval_batch_size=2, dataloader_num_workers=2, dataloader_in_order=False
    )
    trainer = Trainer(Regression(), args, train_dataset=Points(8))
    predicted = trainer.predict(SlowAtFirst(9))
    assert predicted.label_ids.tolist() == Points(9).y.tolist()
    with torch.no_grad():
        want = trainer.model(Points(9).x)["logits"]
    torch.testing.assert_close(torch.from_numpy(predicted.predictions), want)
