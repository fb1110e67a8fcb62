"""The tensors in what a forward takes and returns."""

from __future__ import annotations

import dataclasses
import itertools
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# A detector's or tokenizer's output may hold hundreds of thousands of these.
_PLAIN = (int, float, bool, str, bytes, NoneType)


def to_device(values: Any, device: torch.device) -> Any:
    """The same nested containers with every tensor on ``device``."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), values)


def tensors_in(output: Any) -> list[Tensor]:
    """Tensors in nested containers that pytree knows and in dataclasses, however deep, each object once.

    Outputs may refer to themselves or to each other: a tree whose nodes know their parent, a linked list.
    """
    found: list[Tensor] = []
    visited: dict[int, Any] = {}  # keeps what it visited, or another object might get the same id
    waiting = [output]
    while waiting:
        value = waiting.pop()
        if id(value) in visited:
            continue
        visited[id(value)] = value
        if isinstance(value, Tensor):
            found.append(value)
        elif parts := _parts(value):
            waiting += [part for part in reversed(parts) if type(part) not in _PLAIN]
    return found


def _parts(value: Any) -> list[Any]:
    """What ``value`` holds, one level deep; nothing if it is no container."""
    if type(value) in (list, tuple):
        return list(value)
    if type(value) is dict:
        return list(value.values())
    calls = itertools.count()
    parts = pytree.tree_leaves(value, is_leaf=lambda _: next(calls) > 0)  # only the first call is for `value`
    if len(parts) != 1 or parts[0] is not value:
        return parts
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # A field that __init__ does not take may not be set yet.
        names = [field.name for field in dataclasses.fields(value)]
        return [getattr(value, name) for name in names if hasattr(value, name)]
    return []
