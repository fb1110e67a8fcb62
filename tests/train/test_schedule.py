"""Learning rates: the factor of every step, held against transformers' schedules and against theory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from paceline.errors import ArgumentError
from paceline.train.optimizers import decayed_names, optimizer_class
from paceline.train.schedule import SHAPES, make_schedule
from paceline.train.trainer import Trainer
from tests.train.models import Points, Regression, settings

NEEDS_SETTINGS = ("cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay")


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)


def rates(schedule: Any, steps: int = 20) -> list[float]:
    """The learning rate of each step."""
    found = []
    for _ in range(steps):
        found.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize("name", [name for name in SHAPES if name not in NEEDS_SETTINGS])
def test_equals_transformers(name: str, warmup: int) -> None:
    get_scheduler = pytest.importorskip("transformers").get_scheduler
    theirs = get_scheduler(name, optimizer(), num_warmup_steps=warmup, num_training_steps=20)
    assert rates(make_schedule(name, optimizer(), warmup, 20)) == pytest.approx(rates(theirs))


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("cosine", {"num_cycles": 1.5}),
        ("cosine_with_restarts", {"num_cycles": 3}),
        ("polynomial", {"power": 2.0, "lr_end": 0.01}),
        ("inverse_sqrt", {"timescale": 4}),
        ("cosine_with_min_lr", {"min_lr": 0.1}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.3, "num_cycles": 1.5}),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.3}),
        ("cosine_warmup_with_min_lr", {"min_lr": 0.1, "warmup_lr_rate": 0.2}),
        ("warmup_stable_decay", {"num_decay_steps": 6}),
        (
            "warmup_stable_decay",
            {"num_decay_steps": 6, "num_stable_steps": 3, "warmup_type": "cosine", "decay_type": "linear"},
        ),
        ("warmup_stable_decay", {"num_decay_steps": 9, "min_lr_ratio": 0.2, "decay_type": "1-sqrt"}),
        ("warmup_stable_decay", {"num_decay_steps": 9, "warmup_type": "1-sqrt", "num_cycles": 1.0}),
    ],
)
def test_extra_settings_mean_what_they_mean_there(name: str, extra: dict[str, Any]) -> None:
    get_scheduler = pytest.importorskip("transformers").get_scheduler
    theirs = get_scheduler(name, optimizer(), 4, 20, scheduler_specific_kwargs=dict(extra))
    assert rates(make_schedule(name, optimizer(), 4, 20, extra), 24) == pytest.approx(rates(theirs, 24))


@pytest.mark.parametrize(
    ("name", "extra", "words"),
    [
        ("cosine_with_min_lr", {}, "either min_lr or min_lr_rate"),
        ("cosine_with_min_lr", {"min_lr": 0.1, "min_lr_rate": 0.2}, "either min_lr or min_lr_rate"),
        ("warmup_stable_decay", {}, "num_decay_steps"),
        ("warmup_stable_decay", {"num_decay_steps": 2, "warmup_type": "steep"}, "steep"),
        ("reduce_lr_on_plateau", {"patience_steps": 2}, "patience_steps"),
    ],
)
def test_settings_that_are_missing_or_wrong_are_named(name: str, extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make_schedule(name, optimizer(), 3, 20, extra)


def test_a_plateau_lowers_the_rate_by_the_metric(tmp_path: Any) -> None:
    """The loss stands still, so after one evaluation of patience the rate falls by ten, and again."""

    class Still(Regression):
        def forward(self, x: Any, labels: Any = None) -> Any:
            return {"loss": super().forward(x, labels)["loss"] * 0 + 1.0}

    args = settings(
        tmp_path,
        max_steps=6,
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 1},
    )
    trainer = Trainer(Still(), args, train_dataset=Points(8), eval_dataset=Points(8))
    trainer.train()
    found = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert found == pytest.approx([0.1, 0.1, 0.1, 0.01, 0.01, 0.001])


def test_linear_and_cosine_by_hand() -> None:
    assert rates(make_schedule("linear", optimizer(), 2, 6), 6) == pytest.approx(
        [0.0, 0.25, 0.5, 0.375, 0.25, 0.125]
    )
    assert rates(make_schedule("cosine", optimizer(), 0, 4), 4) == pytest.approx(
        [0.25 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    )


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"lr_scheduler_kwargs.*cycles"):
        make_schedule("cosine", optimizer(), 0, 10, {"cycles": 2})


def test_biases_and_norms_do_not_decay() -> None:
    model = torch.nn.ModuleDict(
        {"linear": torch.nn.Linear(2, 2), "scale": torch.nn.LayerNorm(2), "q_norm": torch.nn.Linear(2, 2)}
    )
    assert decayed_names(model) == ["linear.weight"]


def test_optimizers_and_their_settings(tmp_path: Any) -> None:
    chosen, values = optimizer_class(
        settings(tmp_path, optim="sgd", optim_args="momentum=0.9, nesterov=true")
    )
    assert (chosen, values) == (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True})
    chosen, values = optimizer_class(settings(tmp_path, optim="adamw_torch_fused", adam_beta2=0.95))
    assert chosen is torch.optim.AdamW
    assert values == {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True}
    with pytest.raises(ArgumentError, match="optim_args='fast'"):
        optimizer_class(settings(tmp_path, optim_args="fast"))
