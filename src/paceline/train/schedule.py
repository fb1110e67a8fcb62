"""Learning-rate schedules: a factor of the peak learning rate for each optimizer step.

Steps are optimizer steps, whatever the number of ranks and micro-batches behind them.
Each schedule is a plain function of (step, warm-up steps, all steps); with warm-up it
rises from 0 to 1 first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from paceline.errors import ArgumentError


def _constant(step: int, warmup: int, total: int) -> float:
    return 1.0


def _constant_with_warmup(step: int, warmup: int, total: int) -> float:
    return _rise(step, warmup) if step < warmup else 1.0


def _linear(step: int, warmup: int, total: int) -> float:
    if step < warmup:
        return _rise(step, warmup)
    return max(0.0, (total - step) / max(1, total - warmup))


def _cosine(step: int, warmup: int, total: int, num_cycles: float = 0.5) -> float:
    """Loshchilov & Hutter, SGDR (2017), without restarts."""
    if step < warmup:
        return _rise(step, warmup)
    return max(0.0, 0.5 * (1.0 + math.cos(2 * math.pi * num_cycles * _progress(step, warmup, total))))


def _cosine_with_restarts(step: int, warmup: int, total: int, num_cycles: int = 1) -> float:
    """Loshchilov & Hutter, SGDR (2017): `num_cycles` half waves, each from 1 down to 0."""
    if step < warmup:
        return _rise(step, warmup)
    progress = _progress(step, warmup, total)
    return 0.0 if progress >= 1.0 else 0.5 * (1.0 + math.cos(math.pi * ((num_cycles * progress) % 1.0)))


def _polynomial(
    step: int, warmup: int, total: int, peak: float = 1.0, lr_end: float = 1e-7, power: float = 1.0
) -> float:
    if step < warmup:
        return _rise(step, warmup)
    end = lr_end / peak
    return end + (1.0 - end) * max(0.0, 1.0 - _progress(step, warmup, total)) ** power


def _inverse_sqrt(step: int, warmup: int, total: int, timescale: int | None = None) -> float:
    """Vaswani et al., Attention is all you need (2017), with the peak at the end of the warm-up."""
    if step < warmup:
        return _rise(step, warmup)
    scale = timescale or warmup or 10_000
    return 1.0 / math.sqrt((step + scale - warmup) / scale)


SHAPES: dict[str, Callable[..., float]] = {
    "constant": _constant,
    "constant_with_warmup": _constant_with_warmup,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": _polynomial,
    "inverse_sqrt": _inverse_sqrt,
}


def make_schedule(
    name: str, optimizer: Optimizer, warmup: int, total: int, settings: Mapping[str, Any] | str | None = None
) -> LambdaLR:
    """The schedule `name` for `optimizer`.

    Args:
        name: a key of `SHAPES`.
        optimizer: its groups' ``lr`` is the peak.
        warmup: optimizer steps of linear warm-up.
        total: optimizer steps in all.
        settings: the shape's own settings (``lr_scheduler_kwargs``).

    Raises:
        ArgumentError: the shape has no such setting.
    """
    if isinstance(settings, str):
        raise ArgumentError(f"lr_scheduler_kwargs={settings!r}, but a dict is needed")
    settings = dict(settings or {})
    if name == "polynomial":
        settings["peak"] = optimizer.defaults["lr"]
    shape = partial(SHAPES[name], warmup=warmup, total=total, **settings)
    try:
        shape(0)
    except TypeError as error:
        raise ArgumentError(f"lr_scheduler_kwargs={settings!r} does not suit {name!r}: {error}") from error
    return LambdaLR(optimizer, shape)


def _rise(step: int, warmup: int) -> float:
    return step / max(1, warmup)


def _progress(step: int, warmup: int, total: int) -> float:
    return (step - warmup) / max(1, total - warmup)
