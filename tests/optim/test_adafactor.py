"""Adafactor, held against transformers' own, and by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import ArgumentError
from paceline.optim.adafactor import Adafactor


def steps(kind: Any, model: nn.Module, settings: dict[str, Any], count: int = 6) -> list[torch.Tensor]:
    optimizer = kind(model.parameters(), **settings)
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad = noise.to(parameter.dtype)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 1e-2, "scale_parameter": False, "relative_step": False},
        {"lr": 1e-2, "scale_parameter": True, "relative_step": False, "weight_decay": 0.1},
        {"lr": 1e-2, "scale_parameter": False, "relative_step": False, "beta1": 0.9, "clip_threshold": 0.5},
        {"scale_parameter": True, "relative_step": True, "warmup_init": True},
        {},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers(settings: dict[str, Any], dtype: torch.dtype) -> None:
    theirs = pytest.importorskip("transformers.optimization").Adafactor
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Conv1d(4, 3, 2), nn.LayerNorm(3)).to(dtype)
    want = steps(theirs, copy.deepcopy(model), settings)
    for got, value in zip(steps(Adafactor, model, settings), want, strict=True):
        torch.testing.assert_close(got, value)


def test_the_first_step_by_hand() -> None:
    """With no past, the second moment is the squared gradient, so each update is the gradient's sign."""
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, -2.0, 4.0])
    Adafactor([parameter], lr=0.5, scale_parameter=False, relative_step=False).step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([-0.5, 0.5, -0.5]))


def test_settings_that_contradict_are_refused() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(ArgumentError, match="relative_step"):
        Adafactor(parameters, lr=0.1)
    with pytest.raises(ArgumentError, match="warmup_init"):
        Adafactor(parameters, lr=0.1, relative_step=False, warmup_init=True)
