"""Weights in half precision for the length of an evaluation (bf16_full_eval, fp16_full_eval)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def half_precision_weights(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """A block in which all floating-point parameters and buffers of `model` are of `dtype`.

    Afterwards they are what they were, bit for bit: the originals are kept beside the copies, so
    that an evaluation does not wear the model down.

    Args:
        model: in place, so that references to it and its parameters stay good.
        dtype: None for no change.
    """
    if dtype is None:
        yield
        return
    tensors = [each for each in (*model.parameters(), *model.buffers()) if each.is_floating_point()]
    originals = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(dtype)
        yield
    finally:
        for tensor, original in zip(tensors, originals, strict=True):
            tensor.data = original
