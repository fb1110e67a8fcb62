"""Are all replicas the same, bit for bit? If not: which tensor, on which ranks, by how much.

verify_replicas  a digest of the whole model -> one small exchange; nearly always the end
  _find          digests of each tensor -> the first one that differs, and its ranks
  _measure       rank 0's values of that tensor alone -> how far each rank is from them
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.coalesced import (
    bits_of,
    broadcast_tensors,
    device_of_objects,
    gather_objects,
    gather_rows,
)
from paceline.comm.waiting import Peers
from paceline.engine.buffer_forms import has_parts, parts_of
from paceline.errors import ArgumentError, ReplicaMismatchError

HASHED_AT_ONCE_BYTES = 64 * 1024 * 1024  # bounds the host copy of a tensor on an accelerator


@dataclass(frozen=True)
class TensorDigest:
    """One parameter or buffer of one rank.

    Attributes:
        name: its dotted name.
        is_buffer: whether it is a buffer.
        form: shape and dtype in words.
        digest: SHA-1 of its values, in row-major order.
    """

    name: str
    is_buffer: bool
    form: str
    digest: bytes


@dataclass(frozen=True)
class Distance:
    """How far this rank's tensor is from rank 0's.

    Attributes:
        elements: number of elements whose bits differ.
        largest: largest absolute difference of two finite or infinite values.
        with_nan: number of elements that are NaN on exactly one of the two ranks.
    """

    elements: int
    largest: float
    with_nan: int


def verify_replicas(
    module: nn.Module,
    process_group: dist.ProcessGroup,
    *,
    ignored: Collection[str] = (),
    include_buffers: bool = True,
) -> None:
    """Compare parameters and buffers of all ranks bit for bit.

    All ranks must call it at the same point. Equal replicas cost one SHA-1 over the module's bytes and
    one exchange of 20 bytes. Values count, not strides; two NaNs are equal if their bits are.

    Args:
        module: this rank's replica.
        process_group: the ranks that hold one.
        ignored: dotted names that may differ.
        include_buffers: whether buffers must be equal, too. Layers such as BatchNorm update theirs from
            each rank's own batch, so that they differ between a forward and the next broadcast.

    Raises:
        ReplicaMismatchError: on every rank, naming the first tensor that differs, the ranks, and by how much.
        ArgumentError: the module holds tensors of a layout that is neither dense nor sparse.
    """
    compare_replicas(module, Peers(process_group), ignored, include_buffers)


def compare_replicas(
    module: nn.Module, peers: Peers, ignored: Collection[str], include_buffers: bool, when: str = ""
) -> None:
    """``verify_replicas`` for whoever knows the ranks already.

    Args:
        module, ignored, include_buffers: as there.
        peers: the ranks that hold a replica.
        when: begins what errors of the exchange say, as in "forward 3, ".
    """
    tensors = _named_tensors(module, ignored, include_buffers)
    mine = [_digest(name, tensor, is_buffer) for name, (tensor, is_buffer) in tensors.items()]
    whole = hashlib.sha1(repr(mine).encode(), usedforsecurity=False).digest()
    exchange = _Exchange(peers, f"{when}comparison of the ranks' models")
    if exchange.all_equal(whole):
        return
    name = _find(exchange.gather(mine), peers)
    tensor, is_buffer = tensors[name]
    raise ReplicaMismatchError(
        _words_for_difference(name, tensor, is_buffer, _measure(tensor, exchange), peers)
    )


class _Exchange:
    """The collectives of one comparison, all waited for under one name.

    Args:
        peers: the ranks that take part.
        what: names the comparison in errors.
    """

    def __init__(self, peers: Peers, what: str) -> None:
        self._peers = peers
        self._what = what

    def all_equal(self, digest: bytes) -> bool:
        """Whether all ranks give the same bytes; all give equally many."""
        row = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        row = row.to(device_of_objects(self._peers))
        return bool((gather_rows(row, self._peers, self._words) == row).all())

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        return gather_objects(value, self._peers, self._words)

    def of_rank_0(self, tensor: Tensor) -> Tensor:
        """Rank 0's values of a tensor."""
        values = tensor.clone(memory_format=torch.contiguous_format)
        broadcast_tensors([values], self._peers, self._words)
        return values

    def _words(self) -> str:
        return self._what


def _named_tensors(
    module: nn.Module, ignored: Collection[str], include_buffers: bool
) -> dict[str, tuple[Tensor, bool]]:
    named: list[tuple[str, Tensor, bool]] = [(name, p, False) for name, p in module.named_parameters()]
    if include_buffers:
        named += [(name, b, True) for name, b in module.named_buffers()]
    return {
        name + part: (values, is_buffer)
        for name, tensor, is_buffer in named
        if name not in ignored
        for part, values in _readable_parts(name, tensor.detach()).items()
    }


def _readable_parts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if not has_parts(tensor):
        raise ArgumentError(
            f"verify_replicas cannot compare {name}, which is {tensor.layout}; leave it out by `ignored`"
        )
    return parts_of(tensor)


def _digest(name: str, tensor: Tensor, is_buffer: bool) -> TensorDigest:
    hasher = hashlib.sha1(usedforsecurity=False)
    for piece in bits_of(tensor).split(HASHED_AT_ONCE_BYTES):
        hasher.update(piece.cpu().numpy())
    form = f"shape {list(tensor.shape)}, {tensor.dtype}"
    return TensorDigest(name, is_buffer, form, hasher.digest())


def _find(everyone: list[list[TensorDigest]], peers: Peers) -> str:
    """Name of the first tensor whose values differ between ranks.

    Raises:
        ReplicaMismatchError: the ranks do not even hold tensors of the same names, shapes and dtypes.
    """
    first = everyone[0]
    for index in range(max(map(len, everyone))):
        entries = [theirs[index] if index < len(theirs) else None for theirs in everyone]
        _require_same_form(index, entries, peers)
        if len(set(entries)) > 1:
            return first[index].name
    raise AssertionError("called only when the digests differ")


def _require_same_form(index: int, entries: list[TensorDigest | None], peers: Peers) -> None:
    forms = ["nothing" if entry is None else f"{entry.name} of {entry.form}" for entry in entries]
    others = [rank for rank, form in enumerate(forms) if form != forms[0]]
    if others:
        raise ReplicaMismatchError(
            f"the ranks hold different models: tensor {index} is {forms[0]} on "
            f"{_ranks([0], peers)} and {forms[others[0]]} on {_ranks(others, peers)}. Build the same module "
            "on every rank."
        )


def _measure(tensor: Tensor, exchange: _Exchange) -> list[Distance]:
    """Each rank's distance from rank 0, in rank order, on every rank."""
    return exchange.gather(_distance(tensor, exchange.of_rank_0(tensor)))


def _distance(tensor: Tensor, reference: Tensor) -> Distance:
    different = (bits_of(tensor) != bits_of(reference)).view(tensor.numel(), -1).any(1)
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    mine, theirs = (t.reshape(-1)[different].to(wide) for t in (tensor, reference))
    gaps = (mine - theirs).abs()
    gaps = torch.where(mine == theirs, torch.zeros_like(gaps), gaps)  # two equal infinities
    with_nan = mine.isnan() != theirs.isnan()
    gaps = gaps[~gaps.isnan()]
    return Distance(int(different.sum()), float(gaps.max()) if gaps.numel() else 0.0, int(with_nan.sum()))


def _words_for_difference(
    name: str, tensor: Tensor, is_buffer: bool, distances: list[Distance], peers: Peers
) -> str:
    others = [rank for rank, distance in enumerate(distances) if distance.elements]
    amounts = "; ".join(
        f"{_ranks([rank], peers)}: {_amount(distances[rank], tensor.numel())}" for rank in others
    )
    text = f"{name} differs between {_ranks([0], peers)} and {_ranks(others, peers)}: "
    text += amounts if len(others) > 1 else _amount(distances[others[0]], tensor.numel())
    if is_buffer:
        text += (
            ". It is a buffer: layers such as BatchNorm update theirs from each rank's own batch, and ranks "
            "agree again at the next broadcast; SyncBatchNorm keeps them equal at all times"
        )
    return text


def _amount(distance: Distance, numel: int) -> str:
    words = f"largest difference {distance.largest:.2g} in {distance.elements} of {numel} elements"
    return words + (f", {distance.with_nan} of them NaN on one of the two ranks" if distance.with_nan else "")


def _ranks(ranks: list[int], peers: Peers) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, peers.in_job(ranks)))}"
