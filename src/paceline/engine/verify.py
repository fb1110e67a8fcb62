"""Are all replicas the same, bit for bit? If not: which tensor, on which ranks, by how much.

verify_replicas  a digest of the whole model -> one small exchange; nearly always the end
  _find          digests of each tensor -> the first one that differs, and its ranks
  _measure       rank 0's values of that tensor alone -> how far each rank is from them
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.coalesced import broadcast_tensors, gather_objects
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
        ArgumentError: the module holds sparse tensors.
    """
    tensors = _named_tensors(module, ignored, include_buffers)
    mine = [_digest(name, tensor, is_buffer) for name, (tensor, is_buffer) in tensors.items()]
    whole = hashlib.sha1(repr(mine).encode(), usedforsecurity=False).digest()
    if len(set(gather_objects(whole, process_group))) == 1:
        return
    name = _find(mine, gather_objects(mine, process_group))
    tensor, is_buffer = tensors[name]
    raise ReplicaMismatchError(
        _words_for_difference(name, tensor, is_buffer, _measure(tensor, process_group))
    )


def _named_tensors(
    module: nn.Module, ignored: Collection[str], include_buffers: bool
) -> dict[str, tuple[Tensor, bool]]:
    named: list[tuple[str, Tensor, bool]] = [(name, p, False) for name, p in module.named_parameters()]
    if include_buffers:
        named += [(name, b, True) for name, b in module.named_buffers()]
    return {name: (tensor.detach(), is_buffer) for name, tensor, is_buffer in named if name not in ignored}


def _digest(name: str, tensor: Tensor, is_buffer: bool) -> TensorDigest:
    if tensor.layout != torch.strided:
        raise ArgumentError(
            f"verify_replicas compares dense tensors; {name} is {tensor.layout}, leave it out by `ignored`"
        )
    hasher = hashlib.sha1(usedforsecurity=False)
    for piece in _bits(tensor).split(HASHED_AT_ONCE_BYTES):
        hasher.update(piece.cpu().numpy())
    form = f"shape {list(tensor.shape)}, {tensor.dtype}"
    return TensorDigest(name, is_buffer, form, hasher.digest())


def _bits(tensor: Tensor) -> Tensor:
    """The values' bytes in row-major order, 1-d uint8; a view where strides allow."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().view(-1).view(torch.uint8)


def _find(mine: list[TensorDigest], everyone: list[list[TensorDigest]]) -> str:
    """Name of the first tensor whose values differ between ranks.

    Raises:
        ReplicaMismatchError: the ranks do not even hold tensors of the same names, shapes and dtypes.
    """
    first = everyone[0]
    for index in range(max(map(len, everyone))):
        entries = [theirs[index] if index < len(theirs) else None for theirs in everyone]
        _require_same_form(index, entries)
        if len(set(entries)) > 1:
            return first[index].name
    raise AssertionError("called only when the digests differ")


def _require_same_form(index: int, entries: list[TensorDigest | None]) -> None:
    forms = ["nothing" if entry is None else f"{entry.name} of {entry.form}" for entry in entries]
    others = [rank for rank, form in enumerate(forms) if form != forms[0]]
    if others:
        raise ReplicaMismatchError(
            f"the ranks hold different models: tensor {index} is {forms[0]} on rank 0 and {forms[others[0]]} "
            f"on {_ranks(others)}. Build the same module on every rank."
        )


def _measure(tensor: Tensor, group: dist.ProcessGroup) -> list[Distance]:
    """Each rank's distance from rank 0, in rank order, on every rank."""
    reference = tensor.clone(memory_format=torch.contiguous_format)
    broadcast_tensors([reference], group)
    return gather_objects(_distance(tensor, reference), group)


def _distance(tensor: Tensor, reference: Tensor) -> Distance:
    different = (_bits(tensor) != _bits(reference)).view(tensor.numel(), -1).any(1)
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    mine, theirs = (t.reshape(-1)[different].to(wide) for t in (tensor, reference))
    gaps = (mine - theirs).abs()
    gaps = torch.where(mine == theirs, torch.zeros_like(gaps), gaps)  # two equal infinities
    with_nan = mine.isnan() != theirs.isnan()
    gaps = gaps[~gaps.isnan()]
    return Distance(int(different.sum()), float(gaps.max()) if gaps.numel() else 0.0, int(with_nan.sum()))


def _words_for_difference(name: str, tensor: Tensor, is_buffer: bool, distances: list[Distance]) -> str:
    others = [rank for rank, distance in enumerate(distances) if distance.elements]
    amounts = "; ".join(f"rank {rank}: {_amount(distances[rank], tensor.numel())}" for rank in others)
    text = f"{name} differs between rank 0 and {_ranks(others)}: "
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


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
