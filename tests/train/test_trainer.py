"""The Trainer's own parts: what may be passed in, what is written, what may be overridden."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import contents, model_files
from paceline.errors import CheckpointError
from paceline.train.callbacks import PrinterCallback, ProgressCallback
from paceline.train.schedule import make_schedule
from paceline.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.models import Points, Regression, losses, settings, weights


def test_an_optimizer_and_schedule_of_ones_own(tmp_path: Path) -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = make_schedule("linear", optimizer, 0, 10)
    trainer = Trainer(
        model, settings(tmp_path, max_steps=5), train_dataset=Points(40), optimizers=(optimizer, schedule)
    )
    trainer.train()
    assert trainer.optimizer is optimizer
    assert trainer.learning_rate == pytest.approx(0.025)


def test_an_optimizer_of_another_model(tmp_path: Path) -> None:
    other = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    trainer = Trainer(Regression(), settings(tmp_path, weight_decay=0.1))
    decayed, not_decayed = trainer.create_optimizer(other).param_groups
    assert [id(each) for each in decayed["params"]] == [id(other[0].weight)]
    assert {id(each) for each in not_decayed["params"]} == {id(p) for p in other.parameters()} - {
        id(other[0].weight)
    }


def test_an_optimizer_by_its_class(tmp_path: Path) -> None:
    trainer = Trainer(
        Regression(),
        settings(tmp_path, weight_decay=0.1),
        optimizer_cls_and_kwargs=(torch.optim.Adamax, {"eps": 1e-5}),
    )
    optimizer = trainer.create_optimizer()
    assert type(optimizer) is torch.optim.Adamax
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert {group["lr"] for group in optimizer.param_groups} == {0.1}


def test_model_init_makes_the_same_model_for_each_training(tmp_path: Path) -> None:
    def make() -> Regression:
        model = Regression()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        return model

    torch.manual_seed(1)
    args = settings(tmp_path, max_steps=3)
    trainer = Trainer(args=args, train_dataset=Points(20), model_init=make)
    trainer.train()
    first, logged = weights(trainer.model), losses(trainer)
    trainer.train()
    assert losses(trainer) == logged
    assert all(torch.equal(first[name], value) for name, value in weights(trainer.model).items())


def test_a_model_alone_cannot_be_resumed_from(tmp_path: Path) -> None:
    args = settings(tmp_path, max_steps=2, save_strategy="steps", save_steps=2, save_only_model=True)
    Trainer(Regression(), args, train_dataset=Points(20)).train()
    assert not (tmp_path / "checkpoint-2" / "optimizer.pt").exists()
    with pytest.raises(CheckpointError, match="save_only_model"):
        Trainer(Regression(), args, train_dataset=Points(20)).train(resume_from_checkpoint=True)


def test_saving_the_best_only(tmp_path: Path) -> None:
    class Scores(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            return super().evaluate(*args, **kwargs) | {
                "eval_score": [3, 1, 5, 4][self.state.global_step - 1]
            }

    args = settings(
        tmp_path,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="best",
        metric_for_best_model="score",
    )
    trainer = Scores(Regression(), args, train_dataset=Points(40), eval_dataset=Points(3))
    trainer.train()
    assert [contents.step_of(folder) for folder in contents.list_checkpoints(tmp_path)] == [1, 3]
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (5, 3)


def write_files(rank: int, world_size: int, folder: Path) -> None:
    trainer = Trainer(Regression(), settings(folder), train_dataset=Points(20))
    trainer.save_model(str(folder / "model"))
    trainer.save_state()
    trainer.save_metrics("eval", {"eval_loss": 0.5})
    trainer.save_metrics("train", {"train_loss": 0.25})


def test_rank_zero_writes_the_files(tmp_path: Path) -> None:
    run_ranks(write_files, 2, tmp_path, backend=None)
    files = {"model", "trainer_state.json", "all_results.json", "eval_results.json", "train_results.json"}
    assert set(os.listdir(tmp_path)) == files
    assert json.loads((tmp_path / "all_results.json").read_text()) == {"eval_loss": 0.5, "train_loss": 0.25}
    model = Regression()
    model_files.load_model(model, tmp_path / "model")


def test_metrics_are_printed_in_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(Regression(), settings(tmp_path))
    trainer.log_metrics("eval", {"eval_loss": 0.123456, "eval_runtime": 61.5, "steps": 3})
    assert capsys.readouterr().out.splitlines() == [
        "***** eval metrics *****",
        "  eval_loss    =     0.1235",
        "  eval_runtime = 0:01:01.50",
        "  steps        =          3",
    ]


def test_bar_or_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = Trainer(Regression(), settings(tmp_path, max_steps=2), train_dataset=Points(20))
    assert plain.pop_callback(PrinterCallback) is not None
    bar = Trainer(Regression(), settings(tmp_path, max_steps=2, disable_tqdm=False), train_dataset=Points(20))
    capsys.readouterr()
    bar.train()
    assert "2/2" in capsys.readouterr().err
    assert bar.pop_callback(ProgressCallback) is not None
    bar.train()
    assert "2/2" not in capsys.readouterr().err


def test_an_overridden_compute_loss_returns_a_mean(tmp_path: Path) -> None:
    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            outputs = model(inputs["x"])
            loss = (outputs["logits"] - inputs["labels"]).square().mean()
            return (loss, outputs) if return_outputs else loss

    def train(trainer_class: type[Trainer], **changes: Any) -> list[float]:
        trainer = trainer_class(Regression(), settings(tmp_path, **changes), train_dataset=Points(21))
        trainer.train()
        return losses(trainer)

    own = train(Own, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert own == pytest.approx(train(Trainer, per_device_train_batch_size=8), rel=1e-5)


def test_the_bar_shows_loss_and_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = settings(tmp_path, max_steps=300, logging_steps=100, disable_tqdm=False)
    Trainer(Regression(), args, train_dataset=Points(40)).train()
    shown = capsys.readouterr().err
    assert re.search(r"300/300 .*loss \d\S*, \d\S* samples/s", shown), shown[-500:]
