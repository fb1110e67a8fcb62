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
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

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


def _cosine_with_min_lr(
    step: int, warmup: int, total: int, least: float = 0.0, num_cycles: float = 0.5
) -> float:
    """The cosine between 1 and `least`, after a linear warm-up from 0."""
    if step < warmup:
        return _rise(step, warmup)
    return max(0.0, _between(least, math.cos(2 * math.pi * num_cycles * _progress(step, warmup, total))))


def _cosine_warmup_with_min_lr(
    step: int,
    warmup: int,
    total: int,
    least: float = 0.0,
    num_cycles: float = 0.5,
    warmup_lr_rate: float | None = None,
) -> float:
    """The same counted from step 1, with a warm-up from `warmup_lr_rate` (default: 1 / warmup)."""
    if step < warmup:
        if warmup_lr_rate is None:
            return (step + 1) / warmup
        return warmup_lr_rate + (1 - warmup_lr_rate) * step / max(1, warmup - 1)
    progress = (step + 1 - warmup) / max(1, total - warmup)
    return max(0.0, _between(least, math.cos(2 * math.pi * num_cycles * progress)))


def _warmup_stable_decay(
    step: int,
    warmup: int,
    total: int,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> float:
    """Rise, stay, fall (Hu et al., MiniCPM, 2024), each between `min_lr_ratio` and 1."""
    stable = total - warmup - num_decay_steps if num_stable_steps is None else num_stable_steps
    if step < warmup:
        return _lifted(_ramp(warmup_type, step / max(1, warmup), 0.5), min_lr_ratio)
    if step < warmup + stable:
        return 1.0
    into_decay = step - warmup - stable
    if into_decay >= num_decay_steps:
        return min_lr_ratio
    return _lifted(_ramp(decay_type, 1 - into_decay / max(1, num_decay_steps), num_cycles), min_lr_ratio)


def _ramp(kind: str, height: float, num_cycles: float) -> float:
    """The factor at `height`, where 0 is the foot of the ramp and 1 its top."""
    shapes = {
        "linear": lambda: height,
        "cosine": lambda: 0.5 * (1 + math.cos(2 * math.pi * num_cycles * (1 - height))),
        "1-sqrt": lambda: 1 - math.sqrt(1 - height),
    }
    if kind not in shapes:
        raise ArgumentError(f"warmup_type and decay_type may be {', '.join(shapes)}, but not {kind!r}")
    return shapes[kind]()


def _lifted(factor: float, least: float) -> float:
    return max(0.0, factor * (1 - least) + least)


def _between(least: float, cosine: float) -> float:
    """A cosine from 1 down to -1 as a factor from 1 down to `least`."""
    return 0.5 * (1 + cosine) * (1 - least) + least


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
    "cosine_with_min_lr": _cosine_with_min_lr,
    "cosine_warmup_with_min_lr": _cosine_warmup_with_min_lr,
    "warmup_stable_decay": _warmup_stable_decay,
}


def make_schedule(
    name: str, optimizer: Optimizer, warmup: int, total: int, settings: Mapping[str, Any] | str | None = None
) -> LRScheduler:
    """The schedule `name` for `optimizer`.

    Args:
        name: a key of `SHAPES`, or reduce_lr_on_plateau, which moves with a metric instead of the step.
        optimizer: its groups' ``lr`` is the peak.
        warmup: optimizer steps of linear warm-up.
        total: optimizer steps in all.
        settings: the shape's own settings (``lr_scheduler_kwargs``).

    Raises:
        ArgumentError: the shape has no such setting, or lacks one that it needs.
    """
    if isinstance(settings, str):
        raise ArgumentError(f"lr_scheduler_kwargs={settings!r}, but a dict is needed")
    wanted = dict(settings or {})
    try:
        if name == "reduce_lr_on_plateau":
            return ReduceLROnPlateau(optimizer, **wanted)
        shape = partial(SHAPES[name], warmup=warmup, total=total, **_with_peak(name, optimizer, wanted))
        shape(0)
    except TypeError as error:
        raise ArgumentError(f"lr_scheduler_kwargs={wanted!r} does not suit {name!r}: {error}") from error
    return LambdaLR(optimizer, shape)


def _with_peak(name: str, optimizer: Optimizer, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a shape, where what is given as a learning rate becomes a share of the peak."""
    peak = optimizer.defaults["lr"]
    if name == "polynomial":
        return {**settings, "peak": peak}
    if not name.endswith("with_min_lr"):
        return settings
    least, share = settings.pop("min_lr", None), settings.pop("min_lr_rate", None)
    if (least is None) == (share is None):
        raise ArgumentError(
            f"lr_scheduler_type={name!r} needs either min_lr or min_lr_rate in lr_scheduler_kwargs, as in "
            f'lr_scheduler_kwargs={{"min_lr_rate": 0.1}}'
        )
    return {**settings, "least": share if least is None else least / peak}


def _rise(step: int, warmup: int) -> float:
    return step / max(1, warmup)


def _progress(step: int, warmup: int, total: int) -> float:
    return (step - warmup) / max(1, total - warmup)
