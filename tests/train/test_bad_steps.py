"""A NaN or infinite gradient on one rank: the rank and the step by name, and one decision for all."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import NonFiniteError
from paceline.train import nonfinite
from paceline.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.models import Points, Regression, settings, weights


class Notes(logging.Handler):
    """Keeps the text of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Spoilt(Regression):
    """Its loss is spoilt on one rank in one step."""

    def __init__(self, rank: int, value: float) -> None:
        super().__init__()
        self.spoilt, self.value, self.calls = rank == 1, value, 0

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        outputs = super().forward(x, labels)
        self.calls += 1
        if self.spoilt and self.calls == 3:
            outputs["loss"] = outputs["loss"] * self.value
        return outputs


def train_spoilt(rank: int, world_size: int, folder: Path, value: float, clip: float) -> Any:
    notes = Notes()
    logging.getLogger("paceline").addHandler(notes)
    args = settings(folder, max_steps=5, max_grad_norm=clip, lr_scheduler_type="linear", log_level="warning")
    trainer = Trainer(Spoilt(rank, value), args, train_dataset=Points(64))
    before: list[dict[str, Tensor]] = []

    class Watch:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            before.append(weights(trainer.model))

    trainer.add_callback(Watch())
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return notes.texts, before, logged, trainer.state.global_step


@pytest.mark.parametrize(("value", "clip", "word"), [(float("nan"), 1.0, "nan"), (float("inf"), 0.0, "inf")])
def test_rank_and_step_are_named_and_no_rank_takes_the_step(
    tmp_path: Path, value: float, clip: float, word: str
) -> None:
    reports = run_ranks(train_spoilt, 2, tmp_path, value, clip, backend=None, timeout=60)
    for texts, after, logged, steps in reports:
        (text,) = [text for text in texts if "step 3" in text]
        assert f"the loss of rank 1 is {word}" in text
        assert "no rank takes this step" in text
        assert steps == 5
        assert all(torch.equal(after[1][name], after[2][name]) for name in after[1])
        assert not all(torch.equal(after[2][name], after[3][name]) for name in after[2])
        assert all(value == value for value in logged)
    for name, value_there in reports[0][1][-1].items():
        assert torch.equal(reports[1][1][-1][name], value_there)
        assert torch.isfinite(value_there).all()


def test_a_run_of_nothing_but_bad_steps_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonfinite, "MOST_IN_A_ROW", 4)

    class Hopeless(Regression):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            return {"loss": super().forward(x, labels)["loss"] * float("nan")}

    trainer = Trainer(Hopeless(), settings(tmp_path, max_steps=9), train_dataset=Points(64))
    with pytest.raises(NonFiniteError, match=r"step 4: the loss of rank 0 is nan.*4th such step"):
        trainer.train()
