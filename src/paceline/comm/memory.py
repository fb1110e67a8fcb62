"""Where the tensors lie that collectives work on."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Allocate(Protocol):
    """Makes a 1-d tensor of zeros."""

    def __call__(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of ``numel`` zeros."""


def plain_memory(numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory like any other tensor's."""
    return torch.zeros(numel, dtype=dtype, device=device)


def memory_of(group: dist.ProcessGroup) -> Allocate:
    """Memory on which the collectives of ``group`` are quickest.

    A group may own memory, in the terms of torch's own backends: ``supports_tensor_alloc(device)``
    and ``allocate_tensor(size, dtype=, device=)``. With any other group it is plain memory.
    """
    supports = getattr(group, "supports_tensor_alloc", None)
    if supports is None:
        return plain_memory

    def allocate(numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if not supports(device):
            return plain_memory(numel, dtype=dtype, device=device)
        tensor: Tensor = group.allocate_tensor(numel, dtype=dtype, device=device)  # type: ignore[attr-defined]
        return tensor.zero_()

    return allocate
