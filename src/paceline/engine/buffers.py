"""Module buffers follow one rank.

Note "buffers": they are broadcast twice in a step. At the end of a backward that synchronised, so that
all ranks evaluate and save the same model; an evaluation that runs on one rank alone could not wait for
the others. And at the first forward after it, but not before each of several forwards, because they may
have been changed in between. Writing into a buffer that a living graph has saved would break its
backward, so such a buffer is replaced and not written.

Note "forms first": a message fits on all ranks only where their buffers have the same names and forms.
So every pass's tail carries a fingerprint of those (``report_forms``), and what it said then, on all ranks
alike, is what the next broadcast sends and expects. Where fingerprints differ, and before the first
broadcast, the ranks exchange the forms themselves. What has changed its form since the tail is left out
by the rank that holds it, which says so in the message's first bytes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.coalesced import broadcast_values, gather_objects, is_overlapping, same_bits
from paceline.comm.interpreted import interpreted
from paceline.comm.waiting import Peers
from paceline.engine.buffer_forms import (
    BufferForm,
    BufferTable,
    assemble,
    fingerprint_of,
    names_of_own_caches,
    parts_of,
)


@dataclass(frozen=True)
class BufferHook:
    """The user's own way to synchronise buffers; see ``BufferSync.set_hook``."""

    state: Any
    function: Callable[[Any, dict[str, Tensor]], Any]
    after_forward: bool


@interpreted
class BufferSync:
    """Keeps a module's buffers equal on all ranks.

    Args:
        module: the wrapped module.
        peers: the ranks that hold copies of it.
        ignored: dotted names of buffers that are left alone.
        device: of messages that are about no buffer.
        enabled: whether training broadcasts at all.

    Attributes:
        joining: whether the ranks are in a join context, where buffers follow a rank that still has data.
    """

    def __init__(
        self, module: nn.Module, peers: Peers, ignored: Collection[str], device: torch.device, enabled: bool
    ) -> None:
        self._module = module
        self._peers = peers
        self._device = device
        self._table = BufferTable(module, ignored)
        self._agreed: dict[str, BufferForm] | None = None  # the same on all ranks; None: to be exchanged
        self._reported: dict[str, BufferForm] = {}
        self._own_caches: frozenset[str] = frozenset()  # differ between ranks by design
        self._passes_seen = -1
        self._hook: BufferHook | None = None
        self._futures: list[torch.futures.Future[Any]] = []
        self.enabled = enabled
        self.joining = False

    def named(self) -> dict[str, Tensor]:
        """The buffers that are kept equal, by dotted name."""
        named = self._table.named()
        return {name: buffer for name, buffer in named.items() if name not in self._own_caches}

    # -- when -------------------------------------------------------------------------------

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
        has_any = bool(self.named()) if self._hook is not None else self._agreed != {}
        due = self.is_due(passes_finished) and has_any
        self._passes_seen = passes_finished
        return due

    # -- forms ------------------------------------------------------------------------------

    def report_forms(self) -> int:
        """What this rank says of its buffers in the tail of a pass: a number below 2**20."""
        if not self.enabled or self._hook is not None:
            return 0
        self._reported = self._forms()
        return fingerprint_of(self._reported)

    def hear_forms(self, alike: bool) -> None:
        """What the tail said, on all ranks alike: whether all reported the same."""
        self._agreed = self._reported if alike else None

    def _forms(self) -> dict[str, BufferForm]:
        return {name: form for name, form in self._table.forms().items() if name not in self._own_caches}

    def _agree(self, what: Callable[[], str]) -> dict[str, BufferForm]:
        """The buffers that all ranks hold in one form."""
        if self._agreed is None:
            everyone = gather_objects(
                self._forms(), self._peers, lambda: f"{what()}, comparison of their forms"
            )
            self._own_caches |= names_of_own_caches(everyone, self._peers.in_job(range(len(everyone))))
            self._agreed = self._forms()
        return self._agreed

    # -- values -----------------------------------------------------------------------------

    def after_pass(self, number: int) -> None:
        """Follow rank 0 at the end of a synchronising pass, if the ranks' buffers have one form.

        Else, and under join, that is left to the next forward.
        """
        if self.enabled and self._agreed and self._hook is None and not self.joining:
            self.broadcast(0, f"backward pass {number}")

    def broadcast(self, source: int, when: str | None = None) -> None:
        """Make every rank's buffers equal to those of rank ``source`` of the group.

        Args:
            source: the rank that is followed.
            when: the moment, for error messages; a forward by default.

        Raises:
            ReplicaMismatchError: a persistent buffer has another name or form on some rank.
            CommunicationError: a rank did not come, or is gone; it is named.
        """
        what = functools.partial(self._words, when)
        agreed = self._agree(what)
        if not agreed:
            return
        buffers, now = self._table.named(), self._table.forms()
        held = {name: buffers[name] for name, form in agreed.items() if now.get(name) == form}
        parts = {
            name: [*parts_of(held[name]).values()] if name in held else form.empty_parts()
            for name, form in agreed.items()
        }
        is_sent = torch.tensor([name in held for name in agreed], device=self._device)
        tensors = [is_sent, *itertools.chain.from_iterable(parts.values())]
        message = broadcast_values(tensors, self._peers, what, source)
        first = next(message, None)  # None on the source, which by then has sent everything
        if first is not None:
            sent = [name for name, flag in zip(agreed, first[1].tolist(), strict=True) if flag]
            wanted = {name: parts[name] for name in sent if name in held}
            self._receive(message, wanted, held)

    def _receive(
        self,
        message: Iterable[tuple[Tensor, Tensor]],
        wanted: Mapping[str, list[Tensor]],
        held: Mapping[str, Tensor],
    ) -> None:
        """Take over what differs.

        Args:
            message: parts of buffers, and the source's values for them.
            wanted: the parts of each buffer to take over, by its name.
            held: the buffers by name.
        """
        owners = {id(part): name for name, parts in wanted.items() for part in parts}
        differing: dict[str, dict[int, Tensor]] = {}
        for part, value in message:
            if id(part) not in owners or same_bits(part, value):
                continue
            name = owners[id(part)]
            if held[name] is part:
                self._write(part, value)
            else:
                differing.setdefault(name, {})[id(part)] = value.clone()
        for name, new in differing.items():
            whole = [new.get(id(part), part) for part in wanted[name]]
            self._replace(held[name], assemble(held[name], whole))

    @torch.no_grad()
    def _write(self, buffer: Tensor, value: Tensor) -> None:
        """Give a buffer a new value.

        In place, unless something besides Python refers to the tensor: then a living graph may have
        saved it, and the module gets a new tensor instead; as it does for one whose elements overlap.
        """
        if buffer._use_count() == 1 and not is_overlapping(buffer):  # type: ignore[attr-defined]
            buffer.copy_(value)
        else:
            self._replace(buffer, value.clone())

    def _replace(self, buffer: Tensor, new: Tensor) -> None:
        for layer in self._module.modules():
            for name, held in layer._buffers.items():
                if held is buffer:
                    layer._buffers[name] = new

    def _words(self, when: str | None) -> str:
        if when is None:
            built = self._passes_seen >= 0
            when = (
                f"forward before backward pass {self._passes_seen + 1}"
                if built
                else "construction of the wrapper"
            )
        names = list(self.named())
        shown = ", ".join(names if len(names) <= 3 else [*names[:2], "..."])
        return f"{when}, broadcast of buffers ({shown})"

    # -- the user's own way -----------------------------------------------------------------

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
