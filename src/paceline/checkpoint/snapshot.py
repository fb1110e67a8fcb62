"""A copy of a state in this process's memory, for a writer that works while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def to_memory(value: Any) -> Any:
    """A copy of nested dicts, lists and tuples in which every tensor is a copy on the CPU.

    Tensors that are one and the same memory (tied weights) are one and the same in the copy
    too, so that files made of it hold them once.
    """
    return _copied(value, {})


def _copied(value: Any, copies: dict[Any, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return _copied_tensor(value, copies)
    if isinstance(value, Mapping):
        return {name: _copied(each, copies) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(each, copies) for each in value)
    return copy.deepcopy(value)


def _copied_tensor(tensor: Tensor, copies: dict[Any, Tensor]) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return tensor.to("cpu", copy=True)
    place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    if place not in copies:
        copies[place] = tensor.to("cpu", copy=True)
    return copies[place]
