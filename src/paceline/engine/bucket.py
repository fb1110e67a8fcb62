"""Flat storage for gradients, one slot per parameter, and what is handed to communication hooks.

A bucket is filled during backward, launched as one collective, and read back when the pass
ends. Between passes each parameter's ``.grad`` *is* its slot: there is one copy of the
gradients in memory, not two.

Note "when a gradient is ours": after ``zero_grad(set_to_none=True)`` autograd hands over a
fresh tensor, which is copied into the slot once; after that ``.grad`` points at the slot and
autograd accumulates into it in place. ``.grad`` being the slot's tensor is not enough, though:
``p.grad.data = x`` (``Module.to`` does that) keeps the tensor and moves it to other memory.
So before launch a bucket looks where its slots are (``_reclaim``).

Note "in flight": while a collective owns a bucket's memory, ``.grad`` is None. A gradient
that comes late (a block used twice under re-entrant checkpointing) therefore lands in a
tensor of its own and is folded in by ``absorb_late``: averaging is idempotent,
mean(average + late) = average + mean(late).
"""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Set
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.comm.memory import Allocate
from paceline.engine.parameters import gradient_dtype
from paceline.engine.words import words_for_gradient_with_graph, words_for_taken_gradient
from paceline.errors import GradientError

# A gradient of at least this many bytes is copied into its slot as soon as it is there, so
# that memory holds it once; smaller ones wait for their bucket and are copied in one call.
COPY_AT_ONCE_BYTES = 64 * 1024
LOW_PRECISION = (torch.float16, torch.bfloat16)
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_LAYOUT = operator.attrgetter("layout")
_VIEW = operator.attrgetter("view")


class Slot:
    """A parameter's place in its bucket, and what happened to it in the current pass.

    Attributes:
        index: the parameter's index in the plan.
        name: its dotted name.
        parameter: the parameter.
        bucket: the bucket it lies in, set when the bucket is made.
        view: the tensor that ``parameter.grad`` becomes: the slot's part of the flat storage.
        firings: how often its gradient was accumulated in the current pass.
        expected_firings: how often it was in the last complete pass.
        reached: whether any backward reached it since the last check for unused parameters.
    """

    __slots__ = (
        "bucket",
        "copies_at_once",
        "expected_firings",
        "firings",
        "index",
        "name",
        "parameter",
        "reached",
        "view",
    )

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.index: int
        self.name: str
        self.bucket: Bucket
        self.view: Tensor | None = None
        self.copies_at_once = parameter.numel() * gradient_dtype(parameter).itemsize >= COPY_AT_ONCE_BYTES
        self.firings = 0
        self.expected_firings = 1
        self.reached = parameter.grad is not None

    def has_hooks_of_others(self) -> bool:
        """Whether the user has hooks on the parameter that want to see its gradient, too."""
        hooks = self.parameter._post_accumulate_grad_hooks
        return hooks is not None and len(hooks) > 1

    def was_taken(self) -> bool:
        """Whether a hook of the user's took the gradient; autograd may also have called with none to give."""
        return self.firings > 0 and self.has_hooks_of_others()


class Bucket(Protocol):
    """What the reducer needs of a bucket."""

    index: int
    slots: list[Slot]
    missing: list[Slot]  # those without gradient on this rank when the bucket was filled
    pending: int
    last: Slot  # whose gradient came last in the last pass; of a new bucket, the last of the plan
    launched: bool

    def ensure_unshared(self) -> None:
        """Before the first gradient of a pass: let go of storage that somebody else refers to."""

    def adopt(self, slot: Slot) -> None:
        """Move a gradient that has just arrived into its slot."""

    def fill(self) -> None:
        """Before launch: bring every slot's gradient (or zeros) into the storage and detach ``.grad``."""

    def payload(self) -> Tensor:
        """What the collective works on, the tail included where the bucket carries it."""

    def gradients_only(self) -> Tensor:
        """What a communication hook works on."""

    def accept(self, result: Tensor) -> None:
        """After the collective: take its result, unless it worked in place."""

    def absorb_late(self) -> None:
        """Add gradients that came after launch to the average, ready to be reduced again."""

    def hand_back(self, nowhere: Set[int]) -> None:
        """Point ``.grad`` at the result, but for parameters (indices) that no rank has a gradient for."""


class DenseBucket:
    """Gradients of one dtype on one device, one after the other in one flat tensor.

    Args:
        index: place in the launch order.
        slots: the parameters, in the order of the plan.
        tail_numel: extra elements behind the gradients, averaged along with them.
        keep_shared: whether a slot that the user still holds (a ``.grad`` kept across
            ``zero_grad``) must not be overwritten.
        allocate: makes the storage.
    """

    def __init__(
        self, index: int, slots: list[Slot], tail_numel: int, keep_shared: bool, allocate: Allocate
    ) -> None:
        self.index = index
        self.slots = slots
        self.missing: list[Slot] = []
        self.pending = len(slots)
        self.last = slots[-1]
        self.launched = False
        self.numel = sum(slot.parameter.numel() for slot in slots)
        self._tail_numel = tail_numel
        self._keep_shared = keep_shared
        self._allocate = allocate
        self._storage: Tensor | None = None
        self._addresses: list[int] = []  # where the slots' views belong
        self._lent: dict[Slot, Tensor] = {}  # the user's own tensors that were ``.grad`` when the pass began
        for slot in slots:
            slot.bucket = self

    @property
    def flat(self) -> Tensor:
        """The gradients, 1-d, in slot order."""
        return self._allocated()[: self.numel]

    @property
    def has_tail(self) -> bool:
        """Whether there are extra elements behind the gradients."""
        return self._tail_numel > 0

    @property
    def tail(self) -> Tensor:
        """The extra elements behind the gradients, 1-d."""
        return self._allocated()[self.numel :]

    def ensure_unshared(self) -> None:
        """Let every gradient that the user holds be what it is in plain PyTorch.

        One that was kept across ``zero_grad(set_to_none=True)`` stays as it was, at the price of new
        storage. One that still is ``.grad`` goes on as ``.grad``: in place if it lives in the
        storage; if the user put another tensor there, the average is copied into that one.
        """
        if not self._keep_shared:
            return
        detached = []
        self._lent = {}
        for slot in self.slots:
            gradient = slot.parameter.grad
            if gradient is None:
                detached.append(slot)
            elif gradient is not slot.view:
                detached.append(slot)
                # Ours: the local name, getrefcount's argument, and autograd's hold on the Python object.
                held = sys.getrefcount(gradient) > 3 or gradient._base is not None
                if held and gradient.layout is torch.strided:
                    self._lent[slot] = gradient
        if self._storage is None or not detached or not self._shared(detached):
            return
        old_views = [slot.view for slot in self.slots]
        self._storage = None
        self._allocated()
        for slot, old in zip(self.slots, old_views, strict=True):
            if slot.parameter.grad is old and old is not None:
                self._copy_in(slot)

    def adopt(self, slot: Slot) -> None:
        if slot.parameter.grad is not slot.view and slot not in self._lent:
            self._copy_in(slot)

    def fill(self) -> None:
        self._reclaim()
        if self._lent:  # what the user has taken out of ``.grad`` since is no longer of interest
            self._lent = {
                slot: tensor for slot, tensor in self._lent.items() if slot.parameter.grad is tensor
            }
        fresh: list[Tensor] = []
        places: list[Slot] = []
        self.missing = []
        for slot in self.slots:
            parameter = slot.parameter
            gradient = parameter.grad
            if gradient is None:
                self.missing.append(slot)
                continue
            if gradient is not slot.view:
                fresh.append(gradient)
                places.append(slot)
            parameter.grad = None
        if fresh:
            _copy_all(fresh, places)
        for slot in self.missing:
            if slot.was_taken():
                raise GradientError(words_for_taken_gradient(slot.name))
            slot.view.zero_()  # type: ignore[union-attr]

    def payload(self) -> Tensor:
        return _wire(self._allocated())

    def gradients_only(self) -> Tensor:
        return self.flat

    def accept(self, result: Tensor) -> None:
        if result.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(result.view(-1))

    def absorb_late(self) -> None:
        for slot in self.slots:
            late = slot.parameter.grad
            if late is not None:
                slot.view.add_(_dense(late))  # type: ignore[union-attr]
                slot.parameter.grad = None

    def hand_back(self, nowhere: Set[int]) -> None:
        for slot in self.slots:
            if slot.index not in nowhere:
                slot.parameter.grad = slot.view
        for slot, tensor in self._lent.items():
            if slot.index not in nowhere:
                slot.parameter.grad = tensor.copy_(slot.view)  # type: ignore[arg-type]
        self._lent = {}

    @torch.no_grad()
    def _copy_in(self, slot: Slot) -> None:
        gradient = slot.parameter.grad
        if gradient is None:
            return  # autograd had none to give; or a hook took it, which `fill` sees
        if gradient.requires_grad:
            warnings.warn(words_for_gradient_with_graph(slot.name), stacklevel=2)
        self._allocated()
        view = slot.view
        view.copy_(_dense(gradient))  # type: ignore[union-attr]
        slot.parameter.grad = view

    def _allocated(self) -> Tensor:
        if self._storage is None:
            first = self.slots[0].parameter
            numel = self.numel + self._tail_numel
            self._storage = self._allocate(numel, dtype=gradient_dtype(first), device=first.device)
            self._make_views(self._storage)
        return self._storage

    def _make_views(self, storage: Tensor) -> None:
        offset = 0
        for slot in self.slots:
            slot.view = _alias(storage, offset, slot.parameter)
            offset += slot.parameter.numel()
        self._addresses = self._addresses_now()

    def _addresses_now(self) -> list[int]:
        return [slot.view.data_ptr() for slot in self.slots]  # type: ignore[union-attr]

    def _reclaim(self) -> None:
        """Make new views if somebody moved one to other memory; a ``.grad`` that moved counts as fresh."""
        storage = self._allocated()
        if self._addresses_now() != self._addresses:
            self._make_views(storage)

    def _shared(self, detached: list[Slot]) -> bool:
        """Whether anybody refers to a slot, or to a view of one, that is no ``.grad`` any more."""
        if any(sys.getrefcount(slot.view) > 2 for slot in detached):  # ours: the slot, getrefcount's argument
            return True
        storage = self._storage.untyped_storage()  # type: ignore[union-attr]
        ours = 1 + len(self.slots) + 1  # the flat tensor, the slots, and the object made in the line above
        return torch._C._storage_Use_Count(storage._cdata) > ours


class SparseBucket:
    """One parameter whose gradient is a sparse COO tensor.

    float16 and bfloat16 travel as float32, which process groups can add.

    Args:
        index: place in the launch order.
        slot: the parameter.
    """

    def __init__(self, index: int, slot: Slot) -> None:
        self.index = index
        self.slots = [slot]
        self.missing: list[Slot] = []
        self.pending = 1
        self.last = slot
        self.launched = False
        self._gradient: Tensor | None = None
        slot.bucket = self

    def ensure_unshared(self) -> None:
        """Sparse gradients are fresh tensors in every pass: there is nothing to protect."""

    def adopt(self, slot: Slot) -> None:
        """A sparse gradient stays where it is until launch."""

    def fill(self) -> None:
        (slot,) = self.slots
        gradient = slot.parameter.grad
        if gradient is None and slot.was_taken():
            raise GradientError(words_for_taken_gradient(slot.name))
        if gradient is not None and gradient.requires_grad:
            warnings.warn(words_for_gradient_with_graph(slot.name), stacklevel=2)
        self.missing = [slot] if gradient is None else []
        self._gradient = _sparse(gradient, slot.parameter)
        slot.parameter.grad = None

    def payload(self) -> Tensor:
        gradient = self.gradients_only()
        if gradient.dtype in LOW_PRECISION:
            gradient = self._gradient = gradient.float()
        return gradient

    def gradients_only(self) -> Tensor:
        """The gradient: a sparse bucket never carries the tail."""
        assert self._gradient is not None
        return self._gradient

    def accept(self, result: Tensor) -> None:
        self._gradient = result

    def absorb_late(self) -> None:
        (slot,) = self.slots
        late = slot.parameter.grad
        if late is not None:
            self._gradient = (self.gradients_only() + _sparse(late, slot.parameter)).coalesce()
            slot.parameter.grad = None

    def hand_back(self, nowhere: Set[int]) -> None:
        (slot,) = self.slots
        if slot.index not in nowhere:
            slot.parameter.grad = self.gradients_only().to(gradient_dtype(slot.parameter))
        self._gradient = None


class GradBucket:
    """What a communication hook receives: torch.distributed.GradBucket's methods over our bucket.

    A hook is any callable ``(state, bucket) -> torch.futures.Future[Tensor]``; the future's
    value is the reduced buffer. The gradients are this rank's own, not yet divided.
    """

    def __init__(self, bucket: Bucket, is_last: bool) -> None:
        self._bucket = bucket
        self._is_last = is_last
        self._buffer = bucket.gradients_only()

    def index(self) -> int:
        """Place of the bucket in the launch order."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """The flattened gradients, 1-d, in the bucket's dtype (sparse: the gradient itself)."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Put another tensor in place of the buffer; ``gradients`` follows it."""
        self._buffer = buffer

    def is_last(self) -> bool:
        """Whether this is the last bucket of the pass."""
        return self._is_last

    def parameters(self) -> list[Tensor]:
        """The bucket's parameters, in slot order."""
        return [slot.parameter for slot in self._bucket.slots]

    def gradients(self) -> list[Tensor]:
        """The buffer cut into one tensor per parameter, with the parameters' shapes."""
        if self._buffer.is_sparse:
            return [self._buffer]
        gradients, offset = [], 0
        for parameter in self.parameters():
            gradients.append(_alias(self._buffer, offset, parameter))
            offset += parameter.numel()
        return gradients


def _alias(flat: Tensor, offset: int, like: Tensor) -> Tensor:
    """A tensor over part of ``flat`` with the shape and, where they leave no holes, the strides of ``like``.

    Not an autograd view: users may call ``detach_()`` on a gradient.
    """
    strides = torch.empty_like(like, device="meta").stride()  # those of `like` if it is dense, else packed
    alias = flat.new_empty(0)
    return alias.set_(flat.untyped_storage(), flat.storage_offset() + offset, like.shape, strides)


def _copy_all(gradients: list[Tensor], slots: list[Slot]) -> None:
    """Copy gradients into their slots; runs over all parameters in every pass, so it asks in bulk first."""
    if any(map(_REQUIRES_GRAD, gradients)):
        name = next(slot.name for g, slot in zip(gradients, slots, strict=True) if g.requires_grad)
        warnings.warn(words_for_gradient_with_graph(name), stacklevel=2)
    if set(map(_LAYOUT, gradients)) != {torch.strided}:
        gradients = list(map(_dense, gradients))
    torch._foreach_copy_(list(map(_VIEW, slots)), gradients)


def _wire(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat) if flat.is_complex() else flat


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _sparse(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    if gradient is None:
        device = parameter.device
        indices = torch.empty((1, 0), dtype=torch.long, device=device)
        values = torch.empty((0, *parameter.shape[1:]), dtype=gradient_dtype(parameter), device=device)
        return torch.sparse_coo_tensor(
            indices, values, parameter.shape, device=device, is_coalesced=True, check_invariants=False
        )
    gradient = gradient.detach()
    return (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
