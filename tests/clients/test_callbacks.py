"""Callbacks written for Hugging Face's classes, and calls of their handler, work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ArgumentError
from paceline.train.callbacks import EVENTS
from paceline.train.trainer import Trainer
from tests.train.models import Points, Regression, settings

transformers = pytest.importorskip("transformers")


class Recorder(transformers.TrainerCallback):
    """Notes each event, with what it can see."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.payloads: dict[str, Any] = {}

    def __getattribute__(self, name: str) -> Any:
        if name not in EVENTS:
            return super().__getattribute__(name)

        def note(args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            self.seen.append(name)
            self.payloads[name] = kwargs
            return control

        return note


def run(folder: Path, callbacks: list[Any], **changes: Any) -> Trainer:
    args = settings(folder, **{"max_steps": 2, **changes})
    trainer = Trainer(
        Regression(), args, train_dataset=Points(8), eval_dataset=Points(3), callbacks=callbacks
    )
    trainer.train()
    return trainer


def test_every_event_comes_in_order_with_its_payload(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = run(
        tmp_path, [recorder], gradient_accumulation_steps=2, per_device_train_batch_size=2,
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, logging_steps=2,
    )  # fmt: skip
    step = ["on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"]
    due = ["on_log", "on_prediction_step", "on_log", "on_evaluate", "on_save"]
    assert recorder.seen == [
        "on_init_end", "on_train_begin", "on_epoch_begin", *step, *step, *due,
        "on_epoch_end", "on_log", "on_train_end",
    ]  # fmt: skip
    wanted = {"model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"}
    assert wanted <= set(recorder.payloads["on_step_end"])
    assert recorder.payloads["on_step_end"]["model"] is trainer.model
    assert "eval_loss" in recorder.payloads["on_evaluate"]["metrics"]
    assert "train_loss" in recorder.payloads["on_log"]["logs"]


class StopsAt2(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 2


class EndsEpochAt1(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop |= state.global_step == 1


EVERY_EPOCH = {"num_train_epochs": 2, "eval_strategy": "epoch", "save_strategy": "epoch"}
EVERY_OTHER_STEP = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
# Settings and callbacks of runs; an epoch has 4 micro-batches.
RUNS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "steps": ({"max_steps": 3, **EVERY_OTHER_STEP}, []),
    "epochs": ({**EVERY_EPOCH, "logging_strategy": "epoch", "gradient_accumulation_steps": 2}, []),
    "the best model": ({**EVERY_EPOCH, "load_best_model_at_end": True}, []),
    "at the start": ({"max_steps": 2, "eval_on_start": True, "logging_first_step": True}, []),
    "a stop": ({"max_steps": 5, **EVERY_OTHER_STEP}, [StopsAt2]),
    "a short epoch": ({"num_train_epochs": 2, "eval_strategy": "epoch"}, [EndsEpochAt1]),
    "a fraction": ({"num_train_epochs": 1.5, "save_strategy": "epoch"}, []),
}


class WhenRecorder(Recorder):
    """Notes with each event where training stands."""

    def __getattribute__(self, name: str) -> Any:
        if name not in EVENTS:
            return super().__getattribute__(name)

        def note(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            given = sorted(key for key in ("logs", "metrics") if kwargs.get(key))
            self.seen.append((name, state.global_step, round(state.epoch or 0, 6), given))

        return note


@pytest.mark.parametrize("name", RUNS)
def test_events_come_as_they_do_there(tmp_path: Path, name: str) -> None:
    changes, callbacks = RUNS[name]
    given = {"save_strategy": "no", "logging_steps": 2, "per_device_eval_batch_size": 4, **changes}
    quiet = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "per_device_train_batch_size": 4}
    theirs_args = transformers.TrainingArguments(output_dir=str(tmp_path / "theirs"), **quiet, **given)
    recorders = []
    for kind, args in ((transformers.Trainer, theirs_args), (Trainer, settings(tmp_path / "ours", **given))):
        recorders.append(WhenRecorder())
        trainer = kind(
            model=Regression(), args=args, train_dataset=Points(14), eval_dataset=Points(6),
            callbacks=[recorders[-1], *callbacks],
        )  # fmt: skip
        trainer.train()
        trainer.evaluate()
        trainer.predict(Points(5))
    theirs, ours = (recorder.seen for recorder in recorders)
    assert ours == theirs


def test_their_early_stopping_stops_here(tmp_path: Path) -> None:
    trainer = run(
        tmp_path, [transformers.EarlyStoppingCallback(2)], max_steps=9, learning_rate=0.0,
        eval_strategy="steps", eval_steps=1, metric_for_best_model="loss",
    )  # fmt: skip
    assert trainer.state.global_step == 3


def test_a_control_that_an_event_returns_is_used(tmp_path: Path) -> None:
    class Replaces(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            return type(control)(should_training_stop=True)

    assert run(tmp_path, [Replaces()]).state.global_step == 1


def test_the_handler_is_called_as_subclasses_call_it(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = Trainer(Regression(), settings(tmp_path), callbacks=[recorder])
    handler = trainer.callback_handler
    handler.on_evaluate(trainer.args, trainer.state, trainer.control, {"eval_loss": 1.0})
    handler.on_log(trainer.args, trainer.state, trainer.control, {"loss": 2.0})
    assert handler.on_step_begin(trainer.args, trainer.state, trainer.control) is trainer.control
    assert recorder.payloads["on_evaluate"]["metrics"] == {"eval_loss": 1.0}
    assert recorder.payloads["on_log"]["logs"] == {"loss": 2.0}
    assert "Recorder" in handler.callback_list
    assert not hasattr(handler, "on_no_such_event")


def test_their_classes_name_ours(tmp_path: Path) -> None:
    """Scripts take the printer or the bar out by Hugging Face's class."""
    trainer = Trainer(Regression(), settings(tmp_path))
    trainer.remove_callback(transformers.PrinterCallback)
    assert trainer.callback_handler.callback_list == "DefaultFlowCallback"


def test_states_that_are_saved_come_back(tmp_path: Path) -> None:
    class Counts(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):
        def __init__(self, start: int = 0) -> None:
            self.start, self.count = start, start

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.count += 1

        def state(self) -> dict[str, Any]:
            return {"args": {"start": self.start}, "attributes": {"count": self.count}}

    values = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    run(tmp_path, [Counts(10), Counts(20)], **values)
    for restored, ends in ((True, [14, 24]), (False, [2, 2])):
        counters = [Counts(), Counts()]
        args = settings(tmp_path / str(restored), **values, restore_callback_states_from_checkpoint=restored)
        trainer = Trainer(Regression(), args, train_dataset=Points(8), callbacks=counters)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert [each.count for each in counters] == ends


def test_parts_of_their_loop_cannot_be_overridden_in_vain() -> None:
    with pytest.raises(ArgumentError, match=r"_inner_training_loop.*training_step, compute_loss"):

        class Own(Trainer):
            def _inner_training_loop(self) -> None:
                """Would never be called."""
