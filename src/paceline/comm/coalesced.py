"""Broadcast or compare many tensors as few collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 250 * 1024 * 1024  # bounds the extra memory of one flattened broadcast


def broadcast_tensors(
    tensors: Iterable[Tensor],
    group: dist.ProcessGroup,
    source: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Make every rank's tensors equal to the source rank's, in place.

    Tensors of one dtype and device are flattened into one message of at most ``chunk_bytes``
    (a larger tensor travels alone). All ranks must pass tensors of the same shapes and dtypes.

    Args:
        tensors: any dtypes, devices and strides; sparse tensors are not supported.
        group: the ranks that take part.
        source: rank within ``group`` whose values win.
        chunk_bytes: size of a message in bytes.
    """
    with torch.no_grad():
        for tensor, value in broadcast_values(tensors, group, source, chunk_bytes):
            tensor.copy_(value)


def broadcast_differing(tensors: Iterable[Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Like ``broadcast_tensors``, but leaves alone what is equal already: a graph may have saved it."""
    with torch.no_grad():
        for tensor, value in broadcast_values(tensors, group, source):
            if not torch.equal(tensor, value):
                tensor.copy_(value)


def broadcast_values(
    tensors: Iterable[Tensor],
    group: dist.ProcessGroup,
    source: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Like ``broadcast_tensors``, but leaves the writing to the caller.

    Returns:
        On every rank but the source: each tensor with the source's value for it, a view of a message
        that is freed when the next one comes. On the source: nothing. Must be read to its end.
    """
    for chunk in _chunks(tensors, chunk_bytes):
        yield from _broadcast_chunk(chunk, group, source)


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's picklable value, in rank order, on every rank."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _chunks(tensors: Iterable[Tensor], chunk_bytes: int) -> Iterator[list[Tensor]]:
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same_kind in groups.values():
        chunk: list[Tensor] = []
        size = 0
        for tensor in same_kind:
            nbytes = tensor.numel() * tensor.element_size()
            if chunk and size + nbytes > chunk_bytes:
                yield chunk
                chunk, size = [], 0
            chunk.append(tensor)
            size += nbytes
        yield chunk


def _broadcast_chunk(
    chunk: Sequence[Tensor], group: dist.ProcessGroup, source: int
) -> Iterator[tuple[Tensor, Tensor]]:
    with torch.no_grad():
        flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
    if flat.numel() == 0:
        return
    wire = torch.view_as_real(flat) if flat.is_complex() else flat
    dist.broadcast(wire, group=group, group_src=source)
    if dist.get_rank(group) == source:
        return
    for tensor, piece in zip(chunk, flat.split([tensor.numel() for tensor in chunk]), strict=True):
        yield tensor, piece.view(tensor.shape)
