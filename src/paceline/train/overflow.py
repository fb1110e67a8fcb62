"""``debug="underflow_overflow"``: the first NaN or infinite number of a forward, by its module's name."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.errors import NonFiniteError

NAME = "underflow_overflow"
_FORWARDS_SHOWN = 20


@contextmanager
def watched(model: nn.Module, wanted: bool, where: Callable[[], str]) -> Iterator[None]:
    """A block in which every module's inputs, weights and outputs must be finite.

    Args:
        model: not wrapped.
        wanted: without it, nothing is watched.
        where: rank and step, for the error.

    Raises:
        NonFiniteError: naming the first module that has a NaN or an infinite number, with the smallest and
            the largest absolute value of what it was given, and of the modules that ran before it.
    """
    latest: deque[str] = deque(maxlen=_FORWARDS_SHOWN)
    hooks = []
    for name, module in model.named_modules() if wanted else ():
        hooks.append(
            module.register_forward_hook(_Look(name or "the model", latest, where), with_kwargs=True)
        )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Look:
    """What is called after each forward of one module."""

    def __init__(self, name: str, latest: deque[str], where: Callable[[], str]) -> None:
        self._name, self._latest, self._where = name, latest, where

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        ranges = {
            **{name: _range(value) for name, value in module.named_parameters(recurse=False)},
            **_ranges("input", [args, kwargs]),
            **_ranges("output", output),
        }
        told = ", ".join(f"{what} {low:.2e} to {high:.2e}" for what, (low, high) in ranges.items())
        here = f"{self._name} ({type(module).__name__}): {told}"
        bad = [what for what, (low, high) in ranges.items() if not (low <= high < float("inf"))]
        if bad:
            before = "".join(f"\n    {each}" for each in self._latest)
            raise NonFiniteError(
                f"{self._where()}: NaN or Inf in {', '.join(bad)} of {here}. "
                f"Absolute values of the forwards before, oldest first:{before or ' none'}"
            )
        self._latest.append(here)


def _ranges(what: str, values: Any) -> dict[str, tuple[float, float]]:
    tensors = [each for each in tree_leaves(values) if isinstance(each, Tensor) and _can_overflow(each)]
    names = [what] if len(tensors) == 1 else [f"{what}[{index}]" for index in range(len(tensors))]
    return dict(zip(names, map(_range, tensors), strict=True))


def _can_overflow(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0


def _range(tensor: Tensor) -> tuple[float, float]:
    """Smallest and largest absolute value; NaN if there is one."""
    low, high = torch.aminmax(tensor.detach().abs()) if _can_overflow(tensor) else (0.0, 0.0)
    return float(low), float(high)
