"""Broadcast or gather many values as few collectives, each waited for through ``Peers``.

Broadcasts move bytes, and not numbers: so any dtype will do, on any process group.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_object_coll_device

from paceline.comm.waiting import Peers

CHUNK_BYTES = 250 * 1024 * 1024  # bounds the extra memory of one flattened broadcast
_ALIGNMENT = 16  # bytes; the widest dtype's size, so that every tensor's bytes can be viewed as its dtype


def broadcast_tensors(
    tensors: Iterable[Tensor],
    peers: Peers,
    what: Callable[[], str],
    source: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Make every rank's tensors equal to the source rank's, bit for bit.

    In place, and only where they differ, for a graph may have saved a tensor. Overlapping ones (made by
    ``expand``) cannot be written: they get new storage. Tensors of one device are flattened into one
    message of at most ``chunk_bytes`` (a larger tensor travels alone). All ranks must pass tensors of the
    same shapes and dtypes.

    Args:
        tensors: any dtypes, devices and strides; sparse tensors are not supported.
        peers: the ranks that take part.
        what: gives the words for an error.
        source: rank within the group whose values win.
        chunk_bytes: size of a message in bytes.

    Raises:
        CommunicationError: a rank did not come, or is gone; it is named.
    """
    with torch.no_grad():
        for tensor, value in broadcast_values(tensors, peers, what, source, chunk_bytes):
            if same_bits(tensor, value):
                continue
            if is_overlapping(tensor):
                tensor.data = value.clone()
            else:
                tensor.copy_(value)


def broadcast_values(
    tensors: Iterable[Tensor],
    peers: Peers,
    what: Callable[[], str],
    source: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Like ``broadcast_tensors``, but leaves the writing to the caller.

    Returns:
        On every rank but the source: each tensor with the source's value for it, those of one device in
        the order given; a value is a view of a message that is freed when the next one comes. On the
        source: nothing. Must be read to its end.
    """
    for chunk in _chunks(tensors, chunk_bytes):
        message, places = _lay_out(chunk)
        if peers.rank == source:
            with torch.no_grad():
                torch._foreach_copy_(places, [tensor.detach() for tensor in chunk])
        begin = partial(dist.broadcast, message, group=peers.group, group_src=source, async_op=True)
        peers.run(begin, message.device, what)
        if peers.rank != source:
            yield from zip(chunk, places, strict=True)


def gather_rows(row: Tensor, peers: Peers, what: Callable[[], str]) -> Tensor:
    """Every rank's 1-d tensor of one size, as the rows of a matrix in rank order, on every rank."""
    table = row.new_empty(peers.world_size, row.numel())
    begin = partial(dist.all_gather, list(table.unbind()), row, group=peers.group, async_op=True)
    peers.run(begin, row.device, what)
    return table


def gather_objects(value: Any, peers: Peers, what: Callable[[], str]) -> list[Any]:
    """Every rank's picklable value, in rank order, on every rank.

    Raises:
        CommunicationError: a rank did not come, or is gone; it is named.
    """
    device = device_of_objects(peers)
    mine = bytearray(pickle.dumps(value))
    sizes = gather_rows(torch.tensor([len(mine)], device=device), peers, what).flatten().tolist()
    row = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    row[: len(mine)] = torch.frombuffer(mine, dtype=torch.uint8)
    rows = gather_rows(row.to(device), peers, what).cpu()
    return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def device_of_objects(peers: Peers) -> torch.device:
    """The device on which the group moves what is on no device."""
    return torch.device(_get_object_coll_device(peers.group))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits; equal NaNs are equal."""
    return torch.equal(bits_of(one), bits_of(other))


def is_overlapping(tensor: Tensor) -> bool:
    """Whether several elements share memory, as ``expand`` makes them."""
    return any(extent > 1 and step == 0 for extent, step in zip(tensor.shape, tensor.stride(), strict=True))


def bits_of(tensor: Tensor) -> Tensor:
    """The values' bytes in row-major order, 1-d uint8; a view where strides allow."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().view(-1).view(torch.uint8)


def _chunks(tensors: Iterable[Tensor], chunk_bytes: int) -> Iterator[list[Tensor]]:
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor)
    for same_device in by_device.values():
        chunk: list[Tensor] = []
        size = 0
        for tensor in same_device:
            if chunk and size + tensor.nbytes > chunk_bytes:
                yield chunk
                chunk, size = [], 0
            chunk.append(tensor)
            size += tensor.nbytes
        yield chunk


def _lay_out(chunk: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A 1-d uint8 message for these tensors, and each one's place in it: a view of its shape and dtype."""
    starts, end = [], 0
    for tensor in chunk:
        starts.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    message = torch.empty(end, dtype=torch.uint8, device=chunk[0].device)
    places = [
        message[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, chunk, strict=True)
    ]
    return message, places
