"""Learning rates: the factor of every step, held against transformers' schedules and against theory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from paceline.errors import ArgumentError
from paceline.train.optimizers import decayed_names, optimizer_class
from paceline.train.schedule import SHAPES, make_schedule
from tests.train.models import settings


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
@pytest.mark.parametrize("name", SHAPES)
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
    ],
)
def test_extra_settings_mean_what_they_mean_there(name: str, extra: dict[str, Any]) -> None:
    get_scheduler = pytest.importorskip("transformers").get_scheduler
    theirs = get_scheduler(name, optimizer(), 2, 20, scheduler_specific_kwargs=extra)
    assert rates(make_schedule(name, optimizer(), 2, 20, extra)) == pytest.approx(rates(theirs))


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
