"""Small programs of the kinds that public bug reports are about: the same comes out on 1, 2 and 4 ranks.

Each program gives what one would look at afterwards. Their global batch is 8 samples on any number of ranks.
"""

from __future__ import annotations

import copy
import json
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, WeightedRandomSampler

from paceline.train.callbacks import TrainerCallback
from paceline.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.models import Points, Regression, Sequences, Tagger, losses, settings

PROGRAMS: dict[str, Callable[[Path], Any]] = {}


def program(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    PROGRAMS[function.__name__] = function
    return function


def trainer_of(folder: Path, kind: type[Trainer] = Trainer, **given: Any) -> Trainer:
    """A Trainer of 4 steps of 8 samples; `given` are arguments of its constructor, or settings."""
    names = (
        "model",
        "data_collator",
        "train_dataset",
        "eval_dataset",
        "compute_metrics",
        "callbacks",
        "optimizers",
    )
    parts = {name: given.pop(name) for name in names if name in given}
    ranks = dist.get_world_size() * given.get("gradient_accumulation_steps", 1)
    usual = {"max_steps": 4, "per_device_train_batch_size": 8 // ranks, "per_device_eval_batch_size": 3}
    parts = {"model": Regression(), "train_dataset": Points(29), "eval_dataset": Points(7), **parts}
    return kind(args=settings(folder, **{**usual, **given}), **parts)


def trained(folder: Path, **given: Any) -> list[float]:
    """The losses of such a Trainer, and that of an evaluation afterwards."""
    trainer = trainer_of(folder, **given)
    trainer.train()
    return [*losses(trainer), trainer.evaluate()["eval_loss"]]


def logged(trainer: Trainer, name: str) -> list[Any]:
    return [(entry["step"], entry[name]) for entry in trainer.state.log_history if name in entry]


# Callbacks and overrides


@program
def a_callback_evaluates_the_training_set(folder: Path) -> Any:
    class Evaluates(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            kept = copy.deepcopy(control)
            trainer.evaluate(Points(9), metric_key_prefix="train")
            return kept

    trainer = trainer_of(
        folder, max_steps=-1, num_train_epochs=2, eval_strategy="epoch", callbacks=[Evaluates]
    )
    trainer.train()
    return logged(trainer, "train_loss"), logged(trainer, "eval_loss"), losses(trainer)


@program
def a_loss_logs_parts_of_its_own(folder: Path) -> Any:
    class Logs(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            self.log({"part": float(self.state.global_step)})
            return super().compute_loss(model, inputs, return_outputs, **kwargs)

    trainer = trainer_of(folder, Logs)
    trainer.train()
    return losses(trainer), logged(trainer, "part")


@program
def a_callback_unfreezes_layers(folder: Path) -> Any:
    class Unfreezes(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kwargs["model"].layers[0].requires_grad_(state.global_step >= 2)

    return trained(folder, callbacks=[Unfreezes])


@program
def an_optimizer_with_groups_and_a_schedule_of_its_own(folder: Path) -> Any:
    class Own(Trainer):
        def create_optimizer(self, *args: Any) -> Any:
            first, *rest = self.model.parameters()
            self.optimizer = torch.optim.SGD([{"params": [first], "lr": 0.01}, {"params": rest, "lr": 0.1}])
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.2, num_training_steps)
            return self.lr_scheduler

    trainer = trainer_of(folder, Own, max_steps=-1, num_train_epochs=2)
    trainer.train()
    return losses(trainer), logged(trainer, "learning_rate")


@program
def rank_0_alone_saves_the_model(folder: Path) -> Any:
    trainer = trainer_of(folder)
    trainer.train()
    if trainer.is_world_process_zero():
        trainer.save_model(str(folder / "final"))
    dist.barrier()
    return sorted(path.name for path in (folder / "final").iterdir())


# Data


@program
def a_sampler_that_draws_with_replacement(folder: Path) -> Any:
    class Weighted(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            generator = torch.Generator().manual_seed(3)
            return WeightedRandomSampler(torch.linspace(0.1, 2, 29).tolist(), 29, generator=generator)

    trainer = trainer_of(folder, Weighted, max_steps=-1, num_train_epochs=2)
    trainer.train()
    return losses(trainer)


@program
def data_sets_made_of_others(folder: Path) -> Any:
    joined: Any = ConcatDataset([Subset(Points(29), [5, 3, 1]), Points(20)])
    return trained(
        folder / "a", train_dataset=joined, eval_dataset=Subset(Points(29), [9, 2, 7, 1, 1])
    ), trained(folder / "b", train_dataset=list(Points(13)), eval_dataset=list(Points(3)))


@program
def data_sets_that_give_several_samples_at_once(folder: Path) -> Any:
    class Several(Points):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[index] for index in indices]

    return trained(folder, train_dataset=Several(29), eval_dataset=Several(7))


@program
def a_loader_that_the_script_reads_itself(folder: Path) -> Any:
    trainer = trainer_of(folder)
    read = [[batch["labels"].tolist() for batch in loader] for loader in loaders(trainer)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, read)
    return [
        sorted(label for own in everyone for batch in own[place] for label in batch) for place in range(2)
    ]


def loaders(trainer: Trainer) -> list[DataLoader[Any]]:
    return [trainer.get_train_dataloader(), trainer.get_eval_dataloader()]


@program
def fewer_samples_than_ranks(folder: Path) -> Any:
    trainer = trainer_of(folder, train_dataset=Points(1), compute_metrics=lambda p: {"n": len(p.predictions)})
    trainer.train()
    metrics, predicted = trainer.evaluate(Points(1)), trainer.predict(Points(2))
    return losses(trainer), metrics["eval_loss"], metrics["eval_n"], predicted.predictions.tolist()


# What batches, outputs and metrics may be


@dataclass
class Pair:
    x: Tensor
    labels: Tensor

    def to(self, device: Any) -> Pair:
        return Pair(self.x.to(device), self.labels.to(device))


@program
def batches_that_are_no_dicts(folder: Path) -> Any:
    class OfPairs(Regression):
        def forward(self, pair: Any) -> Any:  # type: ignore[override]
            return super().forward(pair.x, pair.labels)

    def stacked(samples: list[Any]) -> dict[str, Tensor]:
        return {name: torch.stack([each[name] for each in samples]) for name in ("x", "labels")}

    pairs = {"model": OfPairs(), "data_collator": lambda samples: Pair(**stacked(samples))}
    return trained(folder / "pairs", remove_unused_columns=False, **pairs), trained(
        folder / "user dicts", data_collator=lambda samples: UserDict(stacked(samples))
    )


@program
def batches_with_text_and_nothing(folder: Path) -> Any:
    class Reads(Regression):
        def forward(self, x: Tensor, labels: Any = None, text: Any = None, mask: Any = None) -> Any:
            assert text is None or (len(text) == len(x) and mask is None)
            return super().forward(x, labels)

    def collate(samples: list[Any]) -> dict[str, Any]:
        stacked = {name: torch.stack([each[name] for each in samples]) for name in ("x", "labels")}
        return {**stacked, "text": ["a"] * len(samples), "mask": None}

    return trained(folder, model=Reads(), data_collator=collate)


@program
def labels_of_another_size_in_each_sample(folder: Path) -> Any:
    class Detects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.layer = nn.Linear(2, 4)

        def forward(self, x: Tensor, labels: Any = None) -> Any:
            boxes = self.layer(x)
            apart = [
                (box - each["boxes"].sum(0)).square().mean() for box, each in zip(boxes, labels, strict=True)
            ]
            return {"loss": torch.stack(apart).mean(), "boxes": boxes}

    def collate(samples: list[Any]) -> dict[str, Any]:
        labels = [
            {"boxes": torch.ones(int(each["labels"].abs() * 3), 4), "id": each["labels"]} for each in samples
        ]
        return {"x": torch.stack([each["x"] for each in samples]), "labels": labels}

    def ids(prediction: Any) -> dict[str, Any]:
        return {"ids": [float(each["id"]) for batch in prediction.label_ids for each in batch]}

    how = {"remove_unused_columns": False, "eval_do_concat_batches": False}
    trainer = trainer_of(folder, model=Detects(), data_collator=collate, compute_metrics=ids, **how)
    trainer.train()
    metrics = trainer.evaluate()
    return losses(trainer), metrics["eval_loss"], metrics["eval_ids"]


@program
def collators_that_change_the_number_of_rows(folder: Path) -> Any:
    def twice(samples: list[Any]) -> dict[str, Tensor]:
        return {
            name: torch.stack([each[name] for each in samples for _ in range(2)]) for name in ("x", "labels")
        }

    def packed(samples: list[Any]) -> dict[str, Tensor]:
        tokens = torch.cat([each["tokens"][: 2 + int(each["tokens"][0])] for each in samples])
        return {"tokens": tokens[None], "labels": tokens[None]}

    def count(prediction: Any) -> dict[str, int]:
        return {"rows": len(prediction.predictions), "labels": int((prediction.label_ids != -100).sum())}

    trainer = trainer_of(folder / "twice", data_collator=twice, compute_metrics=count)
    trainer.train()
    of_tokens = {"model": Tagger(), "train_dataset": Sequences(29), "eval_dataset": Sequences(7)}
    packs = trainer_of(folder / "packed", data_collator=packed, compute_metrics=count, **of_tokens)
    packs.train()
    metrics, packed_metrics = trainer.evaluate(), packs.evaluate()
    assert (metrics["eval_rows"], metrics["eval_labels"]) == (14, 14)
    wanted = [metrics["eval_loss"], packed_metrics["eval_loss"], packed_metrics["eval_labels"]]
    return losses(trainer), losses(packs), wanted


@program
def outputs_within_outputs(folder: Path) -> Any:
    class More(Regression):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            outputs: Any = super().forward(x, labels)
            return {
                **outputs,
                "more": (outputs["logits"], {"x": x.to(torch.bfloat16)}),
                "one": torch.tensor(2.0),
            }

    predicted = trainer_of(folder, model=More()).predict(Points(7)).predictions
    logits, (again, inside), _ = predicted
    return logits.tolist(), again.tolist(), str(inside["x"].dtype), inside["x"].tolist()


@program
def losses_that_are_no_scalars(folder: Path) -> Any:
    class Row(Regression):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            outputs = super().forward(x, labels)
            return {**outputs, "loss": outputs["loss"].reshape(1)} if "loss" in outputs else outputs

    return trained(folder, model=Row(), gradient_accumulation_steps=2)


@program
def metrics_that_are_no_floats(folder: Path) -> Any:
    def metrics(prediction: Any) -> dict[str, Any]:
        return {
            "a": np.float32(0.5),
            "n": np.int64(len(prediction.label_ids)),
            "t": torch.tensor(1.5),
            "s": "text",
        }

    intervals = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    best = {"metric_for_best_model": "a", "load_best_model_at_end": True}
    trainer = trainer_of(folder, compute_metrics=metrics, **intervals, **best)
    trainer.train()
    dist.barrier()
    state = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())
    return trainer.state.best_metric, [state["log_history"][-1][f"eval_{name}"] for name in "ants"]


# Going on


@program
def a_run_that_has_ended_is_resumed(folder: Path) -> Any:
    first = trainer_of(folder, save_strategy="steps", save_steps=2)
    loss = first.train().training_loss
    again = trainer_of(folder)
    output = again.train(resume_from_checkpoint=True)
    assert all(map(torch.equal, again.model.parameters(), first.model.parameters()))
    assert (output.global_step, output.training_loss) == (4, pytest.approx(loss))
    return loss


@program
def a_run_is_made_longer_and_logs_less(folder: Path) -> Any:
    epochs = {"max_steps": -1, "save_strategy": "epoch", "lr_scheduler_type": "linear"}
    trainer_of(folder, num_train_epochs=1, **epochs).train()
    longer = trainer_of(folder, num_train_epochs=2, logging_steps=3, **epochs)
    longer.train(resume_from_checkpoint=True)
    return logged(longer, "loss"), logged(longer, "learning_rate")


@program
def trainers_in_turn_and_after_an_exception(folder: Path) -> Any:
    class Raises(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise ValueError("mine")

    first = trainer_of(folder / "first", callbacks=[Raises])
    with pytest.raises(ValueError, match="mine"):
        first.train()
    second = trainer_of(folder / "second", model=first.model, train_dataset=Points(13))
    second.train()
    first.remove_callback(Raises)
    first.train()
    return losses(first), losses(second)


@program
def ranks_that_made_other_models(folder: Path) -> Any:
    model = Regression()
    with torch.no_grad():
        model.layers[0].weight.add_(0.1 * dist.get_rank())
    return trained(folder, model=model)


def run_all(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    return {name: function(folder / name) for name, function in PROGRAMS.items()}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """What the programs gave on each of so many ranks."""

    @cache
    def on(world_size: int) -> list[dict[str, Any]]:
        return run_ranks(run_all, world_size, tmp_path_factory.mktemp("programs"), timeout=100)

    return on


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_what_one_rank_gives(outcome: Any, name: str, world_size: int) -> None:
    want = as_lists(outcome(1)[0][name])
    for found in outcome(world_size):
        assert_alike(as_lists(found[name]), want)


def as_lists(value: Any) -> Any:
    return json.loads(json.dumps(value))


def assert_alike(found: Any, want: Any) -> None:
    if isinstance(want, list):
        assert len(found) == len(want)
        for one, other in zip(found, want, strict=True):
            assert_alike(one, other)
    else:
        assert found == (pytest.approx(want, rel=1e-5, abs=1e-6) if isinstance(want, float) else want)
