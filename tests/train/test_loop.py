"""What happens when: callbacks in their order, switches that hold on all ranks, ends of training."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from paceline.engine.ddp import DistributedDataParallel
from paceline.errors import ArgumentError
from paceline.train.callbacks import EVENTS, EarlyStoppingCallback, TrainerCallback
from paceline.train.trainer import Trainer
from tests.ranks import rank_outcomes, run_ranks
from tests.train.models import Points, Regression, losses, settings, weights


class Recorder(TrainerCallback):
    """Notes every event."""

    def __init__(self) -> None:
        self.events: list[str] = []


def _noting(event: str) -> Any:
    def method(self: Recorder, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(event)

    return method


for _event in EVENTS:
    setattr(Recorder, _event, _noting(_event))


def test_events_fire_in_order(tmp_path: Path) -> None:
    recorder = Recorder()
    args = settings(
        tmp_path,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
    )
    Trainer(Regression(), args, train_dataset=Points(6), eval_dataset=Points(3), callbacks=[recorder]).train()
    step = ["on_pre_optimizer_step", "on_optimizer_step", "on_step_end"]
    assert recorder.events == [
        *("on_init_end", "on_train_begin", "on_epoch_begin"),
        *("on_step_begin", "on_substep_end", *step),
        *("on_step_begin", *step),  # the last step of the epoch has two samples, one micro-batch
        *("on_epoch_end", "on_log", "on_prediction_step", "on_log", "on_evaluate", "on_save"),
        *("on_log", "on_train_end"),
    ]


def test_hugging_faces_callbacks_work(tmp_path: Path) -> None:
    base = pytest.importorskip("transformers").TrainerCallback

    class Seen(base):  # type: ignore[misc, valid-type]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            steps.append((state.global_step, kwargs["optimizer"].param_groups[0]["lr"], kwargs["model"]))
            control.should_training_stop = state.global_step == 2
            return control

    steps: list[Any] = []
    model = Regression()
    Trainer(model, settings(tmp_path), train_dataset=Points(20), callbacks=[Seen]).train()
    assert steps == [(1, 0.1, model), (2, 0.1, model)]


class OnOneRank(TrainerCallback):
    """Sets a switch at step 2, on rank 1 alone."""

    def __init__(self, rank: int, switch: str) -> None:
        self.rank, self.switch = rank, switch
        self.seen: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.rank == 1 and state.global_step == 2:
            setattr(control, self.switch, True)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(f"log {state.global_step}")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(f"save {state.global_step}")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(f"evaluate {state.global_step}")


def switch_on_one_rank(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    results = {}
    for switch in (
        "should_training_stop",
        "should_epoch_stop",
        "should_save",
        "should_evaluate",
        "should_log",
    ):
        args = settings(folder / switch, num_train_epochs=2, logging_strategy="no")
        callback = OnOneRank(rank, switch)
        trainer = Trainer(
            Regression(), args, train_dataset=Points(32), eval_dataset=Points(5), callbacks=[callback]
        )
        trainer.train()
        results[switch] = (trainer.state.global_step, callback.seen)
    return results


def test_a_switch_set_on_one_rank_holds_on_all_at_the_same_step(tmp_path: Path) -> None:
    for report in run_ranks(switch_on_one_rank, 2, tmp_path, backend=None):
        assert report["should_training_stop"] == (2, ["log 2"])
        assert report["should_epoch_stop"] == (6, ["log 6"])
        assert report["should_save"] == (8, ["save 2", "log 8"])
        assert report["should_evaluate"] == (8, ["log 2", "evaluate 2", "log 8"])
        assert report["should_log"] == (8, ["log 2", "log 8"])


def log_means(rank: int, world_size: int, folder: Path) -> list[float]:
    trainer = Trainer(Regression(), settings(folder, logging_steps=3), train_dataset=Points(21))
    trainer.train()
    return losses(trainer)


def test_the_logged_loss_is_the_mean_over_steps_and_ranks(tmp_path: Path) -> None:
    each = Trainer(Regression(), settings(tmp_path, per_device_train_batch_size=8), train_dataset=Points(21))
    each.train()
    want = [sum(losses(each)[start : start + 3]) / 3 for start in range(0, 9, 3)]
    for logged in run_ranks(log_means, 2, tmp_path, backend=None):
        assert logged == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(
    ("values", "steps", "epochs"),
    [
        ({"num_train_epochs": 2}, 12, 2),
        ({"num_train_epochs": 1.5}, 9, 1.5),
        ({"max_steps": 7}, 7, 7 / 6),
        ({"num_train_epochs": 1, "dataloader_drop_last": True}, 5, 1),
    ],
)
def test_length_of_a_run(tmp_path: Path, values: dict[str, Any], steps: int, epochs: float) -> None:
    trainer = Trainer(Regression(), settings(tmp_path, **values), train_dataset=Points(21))
    output = trainer.train()
    assert output.global_step == trainer.state.max_steps == steps
    assert trainer.state.epoch == pytest.approx(epochs)
    assert output.training_loss == pytest.approx(sum(losses(trainer)) / steps)


def test_logging_survives_a_nan(tmp_path: Path) -> None:
    class NanOnce(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = super().training_step(model, inputs, num_items_in_batch)
            return loss * math.nan if self.state.global_step == 1 else loss

    trainer = NanOnce(
        Regression(), settings(tmp_path, max_steps=3, logging_steps=3), train_dataset=Points(20)
    )
    trainer.train()
    assert math.isfinite(losses(trainer)[0])


def test_early_stopping_and_the_best_model(tmp_path: Path) -> None:
    args = settings(
        tmp_path,
        num_train_epochs=20,
        learning_rate=0.0,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
    )
    model = Regression()
    before = weights(model)
    trainer = Trainer(
        model, args, train_dataset=Points(8), eval_dataset=Points(5), callbacks=[EarlyStoppingCallback(3)]
    )
    trainer.train()
    assert trainer.state.epoch == 4
    assert trainer.state.best_global_step == 2
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert all(torch.equal(before[name], value) for name, value in weights(model).items())


def test_it_can_train_twice(tmp_path: Path) -> None:
    trainer = Trainer(Regression(), settings(tmp_path, max_steps=4), train_dataset=Points(20))
    trainer.train()
    first = losses(trainer)
    trainer.train()
    assert len(losses(trainer)) == 4
    assert losses(trainer)[-1] < first[0]
    torch.testing.assert_close(trainer.learning_rate, 0.1)


class WithOwnLoader(Trainer):
    """A subclass that builds its loader as a script for one process would."""

    sampler_class: Any = SequentialSampler

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, batch_size=3, sampler=self.sampler_class(self.train_dataset))


def order_of_samples(rank: int, world_size: int, folder: Path, random_order: bool) -> list[list[float]]:
    seen: list[list[float]] = []

    class Watching(WithOwnLoader):
        sampler_class = RandomSampler if random_order else SequentialSampler

        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
            seen.append(inputs["labels"].tolist())
            return super().compute_loss(model, inputs, **kwargs)

    Watching(Regression(), settings(folder, num_train_epochs=1), train_dataset=Points(16)).train()
    return seen


@pytest.mark.parametrize("random_order", [False, True])
def test_a_loader_of_ones_own_is_dealt_out(tmp_path: Path, random_order: bool) -> None:
    reports = run_ranks(order_of_samples, 2, tmp_path, random_order, backend=None)
    joined = [value for step in zip(*reports, strict=True) for part in step for value in part]
    own = Points(16).y.tolist()
    assert sorted(joined) == sorted(own)
    assert (joined == own) is not random_order


def test_what_cannot_be_trained_is_named(tmp_path: Path) -> None:
    args = settings(tmp_path)

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    for dataset, words in [
        (None, "train_dataset"),
        (Stream(), "max_steps"),
        (Points(0), "nothing to train on"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            Trainer(Regression(), args, train_dataset=dataset).train()
    with pytest.raises(ArgumentError, match="no sample on any rank"):
        Trainer(Regression(), settings(tmp_path, max_steps=3), train_dataset=Stream()).train()
    with pytest.raises(ArgumentError, match="either model or model_init"):
        Trainer(args=args)
    with pytest.raises(ArgumentError, match="needed"):
        Trainer("gpt2", args)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="from paceline import Trainer, TrainingArguments"):
        Trainer(Regression(), {"output_dir": "x"})  # type: ignore[arg-type]
    for kind in (torch.nn.parallel.DistributedDataParallel, DistributedDataParallel):
        with pytest.raises(ArgumentError, match=r"Trainer\(model\.module\)"):
            Trainer(kind(Regression()), args)

    args.fsdp = "full_shard"
    with pytest.raises(ArgumentError, match="fsdp="):
        Trainer(Regression(), args)
    args.fsdp = None

    class NoLoss(Regression):
        def forward(self, x: Any, labels: Any = None) -> Any:
            return {"logits": self.layers(x)}

    with pytest.raises(ArgumentError, match="returned no loss, only logits"):
        Trainer(NoLoss(), args, train_dataset=Points(4)).train()


def look_at_wrappers(rank: int, world_size: int, folder: Path) -> list[bool]:
    args = settings(
        folder, ddp_find_unused_parameters=False, ddp_bucket_cap_mb=3, ddp_broadcast_buffers=False
    )
    seen: list[Any] = []

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(trainer.model_wrapped)

    trainer = Trainer(Regression(), settings(folder, max_steps=1), train_dataset=Points(8), callbacks=[Look])
    trainer.train()
    trainer.args = args
    trainer.train()
    return [flag for each in seen[:2] for flag in (each.find_unused_parameters, each.broadcast_buffers)]


def test_the_ddp_arguments_reach_the_wrapper(tmp_path: Path) -> None:
    for flags in run_ranks(look_at_wrappers, 2, tmp_path):
        assert flags == [True, True, False, False]


def test_a_single_rank_trains_the_model_as_it_is(tmp_path: Path) -> None:
    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert trainer.model_wrapped is trainer.model

    trainer = Trainer(
        Regression(), settings(tmp_path, max_steps=1), train_dataset=Points(8), callbacks=[Look]
    )
    assert trainer.train().global_step == 1


class Tuple(nn.Module):
    """Takes and gives tuples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Any, y: Any) -> Any:
        return (self.layer(x).squeeze(-1) - y).square().mean(), x


def test_tuples_will_do_for_batches_and_outputs(tmp_path: Path) -> None:
    points = Points(20)
    dataset = torch.utils.data.TensorDataset(points.x, points.y)
    trainer = Trainer(Tuple(), settings(tmp_path, max_steps=5), train_dataset=dataset)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]


@pytest.mark.parametrize("takes_items", [True, False])
def test_compute_loss_func(tmp_path: Path, takes_items: bool) -> None:
    def total(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
        return (outputs["logits"] - labels).square().sum() / num_items_in_batch

    def mean(outputs: Any, labels: Any) -> Any:
        return (outputs["logits"] - labels).square().mean()

    plain = Trainer(Regression(), settings(tmp_path), train_dataset=Points(21))
    plain.train()
    own = Trainer(
        Regression(),
        settings(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2),
        train_dataset=Points(21),
        compute_loss_func=total if takes_items else mean,
    )
    own.train()
    assert losses(own) == pytest.approx(losses(plain), rel=1e-5)


def test_bf16_is_autocast(tmp_path: Path) -> None:
    seen = []

    class Look(Regression):
        def forward(self, x: Any, labels: Any = None) -> Any:
            seen.append(self.layers[0](x).dtype)
            return super().forward(x, labels)

    Trainer(Look(), settings(tmp_path, bf16=True, max_steps=1), train_dataset=Points(8)).train()
    assert seen == [torch.bfloat16]


def test_gradient_checkpointing_is_the_models_affair(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="gradient_checkpointing_enable"):
        Trainer(Regression(), settings(tmp_path, gradient_checkpointing=True))
    given = {}

    class Able(Regression):
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
            given.update(gradient_checkpointing_kwargs)

    args = settings(
        tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs='{"use_reentrant": false}'
    )
    Trainer(Able(), args)
    assert given == {"use_reentrant": False}


def one_rank_dies(rank: int, world_size: int, folder: Path, how: str) -> None:
    class Die(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if rank == 1 and state.global_step == 3:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(5)

    args = settings(folder, ddp_timeout=2, max_steps=6)
    Trainer(Regression(), args, train_dataset=Points(40), callbacks=[Die]).train()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "killed",
            "PeerLostError: rank 0: {} failed, because the process of rank 1",
        ),
        (
            "late",
            "CollectiveTimeoutError: rank 0: {} failed, because rank 1 did",
        ),
    ],
)
def test_a_rank_that_is_missing_is_named(tmp_path: Path, how: str, words: str) -> None:
    first, _ = rank_outcomes(one_rank_dies, 2, tmp_path, how, backend=None, timeout=20)
    assert words.format("agreeing on what callbacks want (step 3)") in str(first.error)
