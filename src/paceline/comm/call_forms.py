"""The forms in which torch hands over tensors and options, brought to one each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import ArgumentError


def is_plain(tensor: Tensor) -> bool:
    """Whether the kernel can find its values: on the CPU, strided, not quantized."""
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_quantized


def flat_of(tensor: Tensor) -> Tensor:
    """The tensor itself if its memory is its values in order, else a copy of which that is true."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def unshared(source: Tensor, target: Tensor, place: int | None = None) -> Tensor:
    """The source of a collective, or a copy of it where writing to the target would change it too early.

    Args:
        source: contiguous.
        target: contiguous.
        place: the byte of the target from which on the source may lie in it: nothing else is written there.
    """
    begin = source.data_ptr() - target.data_ptr()
    apart = begin >= target.nbytes or begin + source.nbytes <= 0
    return source if apart or begin == place else source.clone()


def bytes_of(flat: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as 1-d uint8."""
    return flat.detach().view(-1).view(torch.uint8)


def unrolled(tensor: Tensor) -> Tensor:
    """The tensor in one dimension, where that is a view of it: Gloo refuses shapes that others take."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor


def copy_back(tensor: Tensor, flat: Tensor) -> Callable[[], Any] | None:
    """What brings the result from ``flat_of(tensor)`` to the tensor; None when it is there."""
    return None if flat is tensor else partial(tensor.copy_, flat)


def copy_all(targets: Sequence[Tensor], gathered: Tensor) -> None:
    """Copy row r of ``gathered`` into target r."""
    torch._foreach_copy_(list(targets), list(gathered))


def listed(tensors: Any) -> list[Tensor]:
    """The tensors of a collective that takes one or a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def bytes_and_back(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], Any] | None]:
    """The bytes of tensors, contiguous: what Gloo moves for any dtype and strides.

    Returns:
        The bytes, and what brings them back to those tensors of which they are a copy; None where no one is.
    """
    flats = [flat_of(tensor) for tensor in tensors]
    copies = [(tensor, flat) for tensor, flat in zip(tensors, flats, strict=True) if flat is not tensor]

    def bring_back() -> None:
        for tensor, flat in copies:
            tensor.copy_(flat)

    return [bytes_of(flat) for flat in flats], bring_back if copies else None


def root_of(opts: Any, size: int) -> int:
    """The root rank of a collective.

    Raises:
        ArgumentError: there is no such rank.
    """
    root: int = opts.rootRank
    if not 0 <= root < size:
        ranks = f"ranks 0 to {size - 1}"
        raise ArgumentError(f"the root of a collective is rank {root}, but the group has {ranks}")
    return root


def options_of(kind: Any, given: Any, timeout: timedelta | None = None) -> Any:
    """The options object for any of the ways in which torch lets a collective be called."""
    if given is not None and hasattr(given, "asyncOp"):
        return given
    options = kind()
    if given is not None:
        options.reduceOp = given
    if timeout is not None:
        options.timeout = timeout
    return options


def broadcast_options_of(given: Any) -> Any:
    """The same for a broadcast, which older callers give the root alone, or nothing."""
    if isinstance(given, dist.BroadcastOptions):
        return given
    options = dist.BroadcastOptions()
    options.rootRank = given or 0
    return options


def new_options(name: str) -> Any:
    """Options of a class that torch.distributed does not export."""
    return getattr(torch._C._distributed_c10d, name)()
