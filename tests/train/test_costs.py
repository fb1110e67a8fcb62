"""What a step leaves out to be quick is not missed: callbacks' events, training mode, a loader's own ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.utils.data import DataLoader

from paceline.train.callbacks import CallbackHandler, TrainerCallback
from paceline.train.trainer import Trainer
from tests.train.models import Points, Regression, losses, settings


class Notes(TrainerCallback):
    def __init__(self) -> None:
        self.noted: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.noted.append(f"step {state.global_step}")


class Foreign:
    """Inherits nothing, and has one event; another is put on the object itself."""

    def __init__(self) -> None:
        self.noted: list[str] = []
        self.on_log = lambda *args, **kwargs: self.noted.append("log")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.noted.append("begin")


def test_callbacks_that_come_and_go_amid_a_run_are_heard(tmp_path: Path) -> None:
    late, foreign = Notes(), Foreign()

    class Changes(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                trainer.add_callback(late)
            if state.global_step == 3:
                trainer.remove_callback(late)
                trainer.callback_handler.callbacks.append(foreign)

    trainer = Trainer(
        Regression(), settings(tmp_path, max_steps=5), train_dataset=Points(40), callbacks=[Changes]
    )
    trainer.train()
    assert late.noted == ["step 2", "step 3"]
    assert foreign.noted == ["log", "begin", "log", "log"]


def test_a_method_put_on_a_callback_before_training_is_called(tmp_path: Path) -> None:
    notes = Notes()
    trainer = Trainer(
        Regression(), settings(tmp_path, max_steps=2), train_dataset=Points(16), callbacks=[notes]
    )
    notes.on_log = lambda *args, **kwargs: notes.noted.append("log")  # type: ignore[method-assign]
    trainer.train()
    assert notes.noted == ["step 1", "log", "step 2", "log", "log"]


def test_the_handler_finds_listeners_anew_when_its_list_is_replaced() -> None:
    handler, first, second = CallbackHandler([], None, None), Notes(), Notes()
    for callbacks in ([first], [second], [first, second], []):
        handler.callbacks = callbacks
        handler.call_event("on_step_end", None, type("State", (), {"global_step": len(callbacks)}), None)  # type: ignore[arg-type]
    assert (first.noted, second.noted) == (["step 1", "step 2"], ["step 1", "step 2"])


@pytest.mark.parametrize("part", ["layers", "layers.2"])
def test_a_module_left_in_evaluation_mode_is_back_in_the_next_step(tmp_path: Path, part: str) -> None:
    model, seen = Regression(dropout=0.5), []

    class Leaves(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            model.get_submodule(part).eval()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(all(module.training for module in model.modules()))

    Trainer(model, settings(tmp_path, max_steps=3), train_dataset=Points(16), callbacks=[Leaves]).train()
    assert seen == [True] * 3


def test_a_model_that_keeps_a_part_in_evaluation_mode_may(tmp_path: Path) -> None:
    class Frozen(Regression):
        def train(self, mode: bool = True) -> nn.Module:
            super().train(mode)
            self.layers[2].eval()
            return self

    model = Frozen(dropout=0.5)
    Trainer(model, settings(tmp_path, max_steps=2), train_dataset=Points(16)).train()
    assert not model.layers[2].training and model.layers[0].training


class CountingLoader(DataLoader[Any]):
    batches = 0

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            self.batches += 1
            yield batch


def test_a_loader_with_an_iteration_of_its_own_is_iterated(tmp_path: Path) -> None:
    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            made = super().get_train_dataloader()
            self.loader = CountingLoader(
                made.dataset, batch_sampler=made.batch_sampler, collate_fn=made.collate_fn
            )
            return self.loader

    own = Own(Regression(), settings(tmp_path, max_steps=3), train_dataset=Points(40, noise=0.3))
    own.train()
    usual = Trainer(Regression(), settings(tmp_path, max_steps=3), train_dataset=Points(40, noise=0.3))
    usual.train()
    assert own.loader.batches == 3
    assert losses(own) == losses(usual)
