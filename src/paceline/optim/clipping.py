"""Clipping the gradient to a norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def clip_gradient(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most `max_norm`.

    The gradients are averaged already, so every rank comes to the same norm by itself.

    Args:
        parameters: those without a gradient are left out.
        max_norm: above 0.

    Returns:
        the norm before clipping, a scalar tensor, the same on every rank.
    """
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The joint 2-norm of all gradients, a scalar tensor, the same on every rank."""
    return torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
