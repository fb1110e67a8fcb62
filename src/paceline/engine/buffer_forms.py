"""What buffers look like, and whether all ranks' look alike.

Modules make buffers while they train: caches that grow with the longest sequence seen, masks made at
the first forward. Were tensors of different sizes broadcast, one buffer's values would end up in
another. So ranks agree on forms before values travel: see ``BufferSync``.
"""

from __future__ import annotations

import itertools
import operator
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.engine.plan import FINGERPRINT_MODULUS
from paceline.errors import ArgumentError, ReplicaMismatchError

_COMPRESSED = {
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_bsr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices),
    torch.sparse_bsc: (Tensor.ccol_indices, Tensor.row_indices),
}


@dataclass(frozen=True)
class BufferForm:
    """Everything about a buffer but its values.

    Attributes:
        words: shape, dtype and layout as a user reads them.
        parts: shape and dtype of each dense tensor that it consists of; see ``parts_of``.
        persistent: whether it is in the module's state_dict.
        device: where it is on this rank; ranks may differ.
    """

    words: str
    parts: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    persistent: bool
    device: torch.device = field(compare=False)

    def empty_parts(self) -> list[Tensor]:
        """Tensors in the place of ``parts_of`` such a buffer; their values mean nothing."""
        return [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self.parts]


class BufferTable:
    """The buffers of a module by name, read again when the module has changed.

    Args:
        module: the wrapped module.
        ignored: dotted names of buffers that are left alone.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str]) -> None:
        self._module = module
        self._ignored = ignored
        self._registries: list[Callable[[], Iterable[Any]]] = []  # what modules hold: children and buffers
        self._registered: list[object] = []
        self._named: dict[str, Tensor] = {}
        self._persistent: Collection[str] = ()
        self._traits: list[Any] = []
        self._forms: dict[str, BufferForm] = {}
        self._scan()

    def named(self) -> dict[str, Tensor]:
        """The buffers, by dotted name."""
        now = self._now_registered()
        if len(now) != len(self._registered) or not all(map(operator.is_, now, self._registered)):
            self._scan()
        return self._named

    def forms(self) -> dict[str, BufferForm]:
        """The form of each buffer, by dotted name in alphabetical order."""
        traits = list(map(_traits_of, self.named().values()))
        if traits != self._traits:
            self._traits = traits
            self._forms = {
                name: _form_of(name, self._named[name], name in self._persistent)
                for name in sorted(self._named)
            }
        return self._forms

    def _scan(self) -> None:
        self._named = {
            name: buffer for name, buffer in self._module.named_buffers() if name not in self._ignored
        }
        self._persistent = {
            f"{prefix}.{key}" if prefix else key
            for prefix, layer in self._module.named_modules()
            for key in set(layer._buffers.keys()) - layer._non_persistent_buffers_set
        }
        self._registries = [
            registry.values
            for layer in self._module.modules()
            for registry in (layer._modules, layer._buffers)  # dicts, or torch.jit's own likes of them
        ]
        self._registered = self._now_registered()
        self._traits = []

    def _now_registered(self) -> list[object]:
        return list(itertools.chain.from_iterable(map(operator.call, self._registries)))


def has_parts(tensor: Tensor) -> bool:
    """Whether ``parts_of`` knows the tensor's layout."""
    return tensor.layout in (torch.strided, torch.sparse_coo, *_COMPRESSED)


def parts_of(tensor: Tensor) -> dict[str, Tensor]:
    """The dense tensors that a tensor consists of: itself, or the indices and values of a sparse one.

    Each stands under what is to be written behind the tensor's name to get it, as in ``.values()``.
    """
    if tensor.layout == torch.strided:
        return {"": tensor}
    if tensor.layout == torch.sparse_coo:
        return {".indices()": tensor._indices(), ".values()": tensor._values()}
    indices = {f".{part.__name__}()": part(tensor) for part in _COMPRESSED[tensor.layout]}
    return {**indices, ".values()": tensor.values()}


def assemble(like: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """A sparse tensor of the form of ``like`` out of other ``parts``."""
    if like.layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(
            parts[0],
            parts[1],
            like.shape,
            device=like.device,
            is_coalesced=like.is_coalesced(),
            check_invariants=False,
        )
    return torch.sparse_compressed_tensor(
        parts[0],
        parts[1],
        parts[2],
        like.shape,
        layout=like.layout,
        device=like.device,
        check_invariants=False,
    )


def fingerprint_of(forms: Mapping[str, BufferForm]) -> int:
    """A number below 2**20 that differs, very likely, where names or forms do."""
    described = repr([(name, form.words) for name, form in forms.items()])
    return zlib.crc32(described.encode()) % FINGERPRINT_MODULUS


def names_of_own_caches(everyone: Sequence[Mapping[str, BufferForm]], ranks: Sequence[int]) -> frozenset[str]:
    """Buffers that differ in form between ranks and may: those that no rank writes into its state_dict.

    Args:
        everyone: the forms of every rank.
        ranks: what each of those ranks is called in the error.

    Raises:
        ReplicaMismatchError: a persistent buffer differs; it is named with the ranks and their shapes.
    """
    own: set[str] = set()
    for name in sorted({name for forms in everyone for name in forms}):
        forms = [theirs.get(name) for theirs in everyone]
        if all(form == forms[0] for form in forms):
            continue
        if any(form is not None and form.persistent for form in forms):
            raise ReplicaMismatchError(_words_for_forms(name, forms, ranks))
        own.add(name)
    return frozenset(own)


def _words_for_forms(name: str, forms: Sequence[BufferForm | None], ranks: Sequence[int]) -> str:
    by_words: dict[str, list[str]] = {}
    for rank, form in zip(ranks, forms, strict=True):
        by_words.setdefault("nothing" if form is None else form.words, []).append(str(rank))
    listed = ", ".join(
        f"{words} on rank{'s' if len(holders) > 1 else ''} {', '.join(holders)}"
        for words, holders in by_words.items()
    )
    return (
        f"the ranks hold different models: buffer {name} is {listed}. Buffers follow rank 0, so give it one "
        "form on all ranks; or, if each rank's own is right (a cache), register it with persistent=False, "
        "which leaves it alone, or put its name into module._ddp_params_and_buffers_to_ignore."
    )


def _traits_of(buffer: Tensor) -> tuple[Any, ...]:
    stored = None if buffer.layout == torch.strided else _stored(buffer)
    return buffer.shape, buffer.dtype, buffer.layout, stored


def _stored(buffer: Tensor) -> tuple[int, bool]:
    is_coalesced = buffer.layout != torch.sparse_coo or buffer.is_coalesced()
    return buffer._nnz(), is_coalesced


def _form_of(name: str, buffer: Tensor, persistent: bool) -> BufferForm:
    words = f"shape {list(buffer.shape)}, {buffer.dtype}"
    if buffer.layout != torch.strided:
        if not has_parts(buffer):
            raise ArgumentError(
                f"buffer {name} is of layout {buffer.layout}, which cannot be broadcast; put its name into "
                "module._ddp_params_and_buffers_to_ignore before wrapping"
            )
        count, is_coalesced = _stored(buffer)
        words += f", {buffer.layout} of {count} entries{'' if is_coalesced else ', not coalesced'}"
    parts = tuple((tuple(part.shape), part.dtype) for part in parts_of(buffer).values())
    return BufferForm(words, parts, persistent, buffer.device)
