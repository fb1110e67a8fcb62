"""What subclasses in other people's scripts override and call, on one rank and on two, with equal results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from paceline.errors import ArgumentError
from paceline.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.models import Points, Regression, losses, settings


class PostProcessing(Trainer):
    """Evaluates as question-answering scripts do: the loop without metrics, then its own."""

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> Any:
        metrics_function, self.compute_metrics = self.compute_metrics, None
        try:
            output = self.evaluation_loop(
                self.get_eval_dataloader(eval_dataset), "Evaluation", None, ignore_keys, metric_key_prefix
            )
        finally:
            self.compute_metrics = metrics_function
        metrics = dict(output.metrics)
        if self.args.should_save:
            metrics["eval_sum"] = float(np.sum(output.predictions))
        if self.args.should_log:
            self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> Any:
        metrics_function, self.compute_metrics = self.compute_metrics, None
        try:
            output = self.evaluation_loop(self.get_test_dataloader(test_dataset), "Prediction", None)
        finally:
            self.compute_metrics = metrics_function
        return output  # every rank goes on with the predictions


def evaluate_with_own_metrics(rank: int, world_size: int, folder: Path) -> Any:
    trainer = PostProcessing(
        Regression(), settings(
            folder, max_steps=2, per_device_train_batch_size=8 // world_size, per_device_eval_batch_size=2
        ),
        train_dataset=Points(16), eval_dataset=Points(7), compute_metrics=lambda pair: {"never": 1.0},
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate()
    return metrics.get("eval_sum"), metrics["eval_loss"], trainer.predict(Points(7)).predictions.tolist()


def test_a_loop_without_metrics_gives_predictions_to_every_rank(tmp_path: Path) -> None:
    ((total, loss, predictions),) = run_ranks(evaluate_with_own_metrics, 1, tmp_path, backend=None)
    first, second = run_ranks(evaluate_with_own_metrics, 2, tmp_path, backend=None)
    assert first[0] == pytest.approx(total, rel=1e-3) and second[0] is None
    for report in (first, second):
        assert report[1] == pytest.approx(loss, rel=1e-3)
        assert report[2] == pytest.approx(predictions, rel=1e-2, abs=1e-3)


class GathersMetrics(Trainer):
    """Gathers in compute_loss and logs the mean, as fine-tuning libraries do."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.largest: list[float] = []

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        errors = (outputs["logits"].detach() - inputs["labels"]).abs().max()
        self.largest.append(self.accelerator.gather_for_metrics(errors).max().item())
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.largest:
            logs["largest"] = max(self.largest)
            self.largest.clear()
        super().log(logs, start_time)


def train_and_gather(rank: int, world_size: int, folder: Path) -> Any:
    trainer = GathersMetrics(
        Regression(), settings(folder, max_steps=3, per_device_train_batch_size=8 // world_size),
        train_dataset=Points(24),
    )  # fmt: skip
    trainer.train()
    return losses(trainer), [entry["largest"] for entry in trainer.state.log_history if "largest" in entry]


def test_what_is_gathered_is_of_all_ranks(tmp_path: Path) -> None:
    (want,) = run_ranks(train_and_gather, 1, tmp_path, backend=None)
    for report in run_ranks(train_and_gather, 2, tmp_path, backend=None):
        assert report[0] == pytest.approx(want[0], rel=1e-5)
        assert report[1] == pytest.approx(want[1], rel=1e-5)


class OwnLoader(Trainer):
    """Gives a loader with a batch sampler of its own, prepared as for Accelerate."""

    def get_train_dataloader(self) -> Any:
        batches = BatchSampler(
            SequentialSampler(self.train_dataset), self.args.train_batch_size, drop_last=True
        )
        self.accelerator.even_batches = False
        return self.accelerator.prepare(DataLoader(self.train_dataset, batch_sampler=batches))


def train_with_own_loader(rank: int, world_size: int, folder: Path) -> list[float]:
    args = settings(folder, max_steps=3, per_device_train_batch_size=8 // world_size)
    trainer = OwnLoader(Regression(), args, train_dataset=Points(24))
    trainer.train()
    return losses(trainer)


def test_batches_of_a_sampler_of_ones_own_are_dealt_out(tmp_path: Path) -> None:
    (want,) = run_ranks(train_with_own_loader, 1, tmp_path, backend=None)
    for report in run_ranks(train_with_own_loader, 2, tmp_path, backend=None):
        assert report == pytest.approx(want, rel=1e-5)


def test_groups_of_ones_own(tmp_path: Path) -> None:
    class TwoRates(Trainer):
        def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> Any:  # type: ignore[override]
            chosen, values = Trainer.get_optimizer_cls_and_kwargs(args, model)
            layers = model.layers
            groups = [
                {"params": layers[0].parameters(), "lr": 1.0},
                {"params": layers[3].parameters(), "lr": 2.0},
            ]
            return chosen, {**values, "optimizer_dict": groups}

    trainer = TwoRates(
        Regression(), settings(tmp_path, max_steps=1, learning_rate=3.0), train_dataset=Points(8)
    )
    with pytest.raises(ArgumentError, match="no optimizer yet"):
        trainer.get_learning_rates()
    trainer.create_optimizer()
    assert trainer.get_learning_rates() == [1.0, 2.0]
    last = trainer.model.layers[3].bias  # type: ignore[index, union-attr]
    assert trainer.get_optimizer_group(last)["lr"] == 2.0
    assert trainer.get_num_trainable_parameters() == 33


def test_a_loss_without_labels_is_evaluated_when_the_model_gives_one(tmp_path: Path) -> None:
    class Unlabelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: torch.Tensor, return_loss: bool = True) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(x).square().mean()}

    data = [{"x": point["x"]} for point in map(Points(5).__getitem__, range(5))]
    trainer = Trainer(Unlabelled(), settings(tmp_path), eval_dataset=data)
    expected = trainer.model(torch.stack([each["x"] for each in data]))["loss"].item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected)


def test_a_model_card_says_what_was_trained(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    trainer = Trainer(Regression(), settings(tmp_path, max_steps=2), train_dataset=Points(8))
    trainer.model.config = type("Config", (), {"_name_or_path": "tiny"})()  # type: ignore[assignment]
    trainer.train()
    trainer.create_model_card(model_name="mine", tasks="regression", tags="small")
    card = (tmp_path / "README.md").read_text()
    assert "mine" in card and "learning_rate: 0.1" in card
