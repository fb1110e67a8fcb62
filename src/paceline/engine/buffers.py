"""Module buffers follow one rank.

Note "buffers": they are broadcast at the first forward after a backward that synchronised,
not before each of several forwards whose graphs are still needed: writing into a buffer
that a living graph has saved would break its backward.
"""

from __future__ import annotations

from collections.abc import Collection

import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.coalesced import broadcast_tensors


class BufferSync:
    """Keeps a module's buffers equal on all ranks.

    Args:
        module: the wrapped module.
        group: the ranks that hold copies of it.
        ignored: dotted names of buffers that are left alone.
        enabled: whether forwards broadcast at all.
    """

    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup, ignored: Collection[str], enabled: bool
    ) -> None:
        self._module = module
        self._group = group
        self._ignored = ignored
        self._passes_seen = -1
        self.enabled = enabled

    def named(self) -> dict[str, Tensor]:
        """The buffers that are kept equal, by dotted name."""
        return {name: buffer for name, buffer in self._module.named_buffers() if name not in self._ignored}

    def is_due(self, passes_finished: int) -> bool:
        """Whether a forward now would be the first one since a synchronising pass finished.

        Args:
            passes_finished: number of synchronising passes so far, equal on all ranks.
        """
        return self.enabled and passes_finished != self._passes_seen

    def make_due(self) -> None:
        """Have the next forward broadcast in any case."""
        self._passes_seen = -1

    def take_turn(self, passes_finished: int) -> bool:
        """Whether this forward broadcasts; if so, the next one does not."""
        due = self.is_due(passes_finished) and bool(self.named())
        self._passes_seen = passes_finished
        return due

    def broadcast(self, source: int) -> None:
        """Make every rank's buffers equal to those of rank ``source`` of the group."""
        broadcast_tensors(self.named().values(), self._group, source)
