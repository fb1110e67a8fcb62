"""Adafactor: Adam's second moments at the cost of a row and a column (Shazeer & Stern, 2018).

The mean of squared gradients of a matrix is kept as its row means and column means, whose outer
product, divided by the mean of all, stands for it. Updates are clipped by their root mean square.
Settings have the names and defaults of transformers' class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ArgumentError


class Adafactor(torch.optim.Optimizer):
    """The optimizer; one step over all groups.

    Args:
        params: parameters, or groups of them.
        lr: learning rate; None with `relative_step`.
        eps: added to squared gradients; least scale of a parameter.
        clip_threshold: root mean square that updates are scaled down to.
        decay_rate: exponent of the decay of second moments, negative.
        beta1: decay of the mean of updates; None keeps none.
        weight_decay: times the learning rate, subtracted from the weights.
        scale_parameter: multiply the learning rate by the parameter's root mean square.
        relative_step: learning rate from the step alone, min(1e-2, 1 / sqrt(step)).
        warmup_init: with `relative_step`: 1e-6 * step instead of 1e-2.

    Raises:
        ArgumentError: `lr` and `relative_step` contradict, or `warmup_init` stands alone.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ) -> None:
        if (lr is None) != relative_step:
            raise ArgumentError(
                f"Adafactor: lr={lr!r} and relative_step={relative_step!r} contradict; set one of them"
            )
        if warmup_init and not relative_step:
            raise ArgumentError("Adafactor: warmup_init=True needs relative_step=True")
        defaults = {
            "lr": lr,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
            "beta1": beta1,
            "weight_decay": weight_decay,
            "scale_parameter": scale_parameter,
            "relative_step": relative_step,
            "warmup_init": warmup_init,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; returns what `closure` does, which computes the gradients anew.

        Raises:
            ArgumentError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)
        return loss

    def _move(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise ArgumentError("Adafactor does not take sparse gradients; use optim='adamw_torch' or 'sgd'")
        gradient = gradient.float()
        state = self.state[parameter]
        if not state:
            state.update(_fresh_state(gradient, group))
        state["step"] += 1
        weights = parameter.float()  # the parameter itself, unless it is of low precision
        rate = _learning_rate(group, state["step"], weights)
        update = gradient * _inverse_root_of_second_moment(gradient, state, group)
        update = update / (_rms(update) / group["clip_threshold"]).clamp(min=1.0) * rate
        if group["beta1"] is not None:
            update = state["exp_avg"].mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
        if group["weight_decay"]:
            weights = weights - weights * (group["weight_decay"] * rate)
        parameter.copy_(weights - update)


def _fresh_state(gradient: Tensor, group: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {"step": 0}
    if gradient.dim() >= 2:
        state["exp_avg_sq_row"] = gradient.new_zeros(gradient.shape[:-1])
        state["exp_avg_sq_col"] = gradient.new_zeros(gradient.shape[:-2] + gradient.shape[-1:])
    else:
        state["exp_avg_sq"] = torch.zeros_like(gradient)
    if group["beta1"] is not None:
        state["exp_avg"] = torch.zeros_like(gradient)
    return state


def _learning_rate(group: dict[str, Any], step: int, weights: Tensor) -> Any:
    rate = group["lr"]
    if group["relative_step"]:
        rate = min(1e-6 * step if group["warmup_init"] else 1e-2, 1 / math.sqrt(step))
    return rate * _rms(weights).clamp(min=group["eps"][1]) if group["scale_parameter"] else rate


def _inverse_root_of_second_moment(gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """1 / sqrt(mean of squared gradients), after this step's gradient has entered it."""
    decay = 1 - state["step"] ** group["decay_rate"]
    squared = gradient.square() + group["eps"][0]
    if gradient.dim() < 2:
        return state["exp_avg_sq"].lerp_(squared, 1 - decay).rsqrt()
    rows = state["exp_avg_sq_row"].lerp_(squared.mean(dim=-1), 1 - decay)
    columns = state["exp_avg_sq_col"].lerp_(squared.mean(dim=-2), 1 - decay)
    row_factor = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt().unsqueeze(-1)
    return row_factor * columns.rsqrt().unsqueeze(-2)


def _rms(tensor: Tensor) -> Tensor:
    return tensor.norm() / math.sqrt(tensor.numel())
