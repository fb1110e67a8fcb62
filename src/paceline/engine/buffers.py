"""Module buffers follow one rank.

Note "buffers": they are broadcast at the first forward after a backward that synchronised,
not before each of several forwards. Writing into a buffer that a living graph has saved
would break its backward, so such a buffer is replaced and not written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.coalesced import broadcast_values


@dataclass(frozen=True)
class BufferHook:
    """The user's own way to synchronise buffers; see ``BufferSync.set_hook``."""

    state: Any
    function: Callable[[Any, dict[str, Tensor]], Any]
    after_forward: bool


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
        self._hook: BufferHook | None = None
        self._futures: list[torch.futures.Future[Any]] = []
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
        for buffer, value in broadcast_values(self.named().values(), self._group, source):
            if not torch.equal(buffer, value):
                self._write(buffer, value)

    @torch.no_grad()
    def _write(self, buffer: Tensor, value: Tensor) -> None:
        """Give a buffer a new value.

        In place, unless something besides Python refers to the tensor: then a living graph may have
        saved it, and the module gets a new tensor instead.
        """
        if buffer._use_count() == 1:  # type: ignore[attr-defined]
            buffer.copy_(value)
            return
        for layer in self._module.modules():
            for name, held in layer._buffers.items():
                if held is buffer:
                    layer._buffers[name] = value.clone()

    def set_hook(
        self, state: Any, function: Callable[[Any, dict[str, Tensor]], Any], after_forward: bool
    ) -> None:
        """Have ``function(state, named_buffers)`` take the place of the broadcast.

        Args:
            state: passed to every call.
            function: may return futures, which are waited for when backward ends.
            after_forward: whether it runs after the forward that is due, or before it.
        """
        self._hook = BufferHook(state, function, after_forward)

    def take_hook_of(self, other: BufferSync) -> None:
        """Go on with the hook of another, if it has one."""
        self._hook = other._hook

    def before_forward(self, passes_finished: int) -> bool:
        """Synchronise if due; True if the hook is to run after this forward instead."""
        if not self.take_turn(passes_finished):
            return False
        if self._hook is None:
            self.broadcast(source=0)
            return False
        if not self._hook.after_forward:
            self.run_hook()
        return self._hook.after_forward

    def run_hook(self) -> None:
        """Call the hook now."""
        assert self._hook is not None
        with torch.no_grad():
            self._futures += self._hook.function(self._hook.state, self.named()) or []

    def wait_for_hook(self) -> None:
        """Wait for the futures that the hook returned."""
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()
