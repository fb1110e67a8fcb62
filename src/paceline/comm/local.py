"""What the ranks of one host share, and the collectives they have in flight."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.calls import BYTES, ELSEWHERE, TYPES, error_for, label_of, reduction_of
from paceline.comm.hosts import Neighbours
from paceline.comm.native import Call, Group, Kind, Operation, Prepared
from paceline.comm.work import CLOSED, DoneWork, KeptWorks, SharedMemoryWork, Worker
from paceline.errors import CommunicationError

_REFUSALS: dict[type[OSError], str] = {
    ChildProcessError: "a forked process cannot use its parent's process group; start workers that need "
    "collectives before init_process_group, or with the spawn method",
    BrokenPipeError: CLOSED,
}


class SharedMemory:
    """What the ranks of one host share, and the operations in flight.

    Args:
        neighbours: the host's ranks, connected.
        global_ranks: their ranks in the whole job, for messages.

    Attributes:
        done: the work of every call that is done when it returns. One for all: making one takes longer
            than a small reduction.
    """

    def __init__(self, neighbours: Neighbours, global_ranks: list[int]) -> None:
        self.neighbours = neighbours
        self.global_ranks = global_ranks
        self.arena = neighbours.arena
        self.futures, self.done = Worker("paceline-futures"), DoneWork()
        self._kernel = neighbours.open()
        self._kept = KeptWorks()
        self.run_prepared = self._kernel.run_prepared
        self._close = weakref.finalize(self, _close, self._kernel, neighbours, self.futures)
        self._close.atexit = False

    def start(
        self,
        call: Call,
        source: Tensor | None,
        target: Tensor | None,
        timeout_s: float,
        results: Sequence[Tensor] = (),
        finish: Callable[[], Any] | None = None,
    ) -> SharedMemoryWork:
        """Queue a collective on contiguous tensors.

        Args:
            call: what to do.
            source: the input.
            target: the output, may be the input.
            timeout_s: how long the other ranks may take.
            results: what the work's future yields.
            finish: called once when it is done, to bring the result where it belongs.
        """
        begin = 0 if source is None else source.data_ptr()
        end = begin if target is source or target is None else target.data_ptr()
        try:
            operation = self._kernel.submit(call, begin, end, timeout_s)
        except OSError as refusal:
            raise _refused(refusal) from None
        work = self._work(operation, call, source, target, timeout_s, results, finish)
        self._kept.keep(work)
        return work

    def run(
        self,
        call: Call,
        source: Tensor | None,
        target: Tensor | None,
        timeout_s: float,
        finish: Callable[[], Any] | None = None,
    ) -> dist.Work:
        """As ``start``, but done when it returns: carried out in the calling thread, if the others are there.

        Raises:
            CommunicationError: as ``SharedMemoryWork.wait``.
        """
        begin = 0 if source is None else source.data_ptr()
        end = begin if target is source or target is None else target.data_ptr()
        try:
            left = self._kernel.run(call, begin, end, timeout_s)
        except OSError as refusal:
            raise _refused(refusal) from None
        if left is not None:
            self._wait_for(self._work(left, call, source, target, timeout_s, (), finish))
        elif finish is not None:
            with torch.no_grad():
                finish()
        return self.done

    def prepare(self, call: Call, timeout_s: float) -> Prepared:
        """A call in place for ``run_prepared``."""
        return self._kernel.prepare(call, timeout_s)

    def finish_prepared(self, left: int, prepared: Prepared, tensor: Tensor) -> dist.Work:
        """Wait for what ``run_prepared`` left of a call; otherwise as ``run``."""
        try:
            operation = self._kernel.left_over(left)
        except OSError as refusal:
            raise _refused(refusal) from None
        self._wait_for(self._work(operation, prepared.call, tensor, tensor, prepared.timeout_s, (), None))
        return self.done

    def all_reduce(self, flat: Tensor, op: Any, timeout_s: float) -> None:
        """Reduce a contiguous tensor over these ranks, in place; done when it returns."""
        reduction = reduction_of(op, flat.dtype)
        assert reduction is not None
        call = reduce_call(Kind.all_reduce, flat.dtype, flat.dtype, reduction, flat.numel(), 0)
        self.run(call, flat, flat, timeout_s)

    def broadcast(self, flat: Tensor, root: int, timeout_s: float) -> None:
        """Copy the contiguous tensor of one of these ranks into the others'; done when it returns."""
        call = copy_call(Kind.broadcast, flat.dtype, flat.nbytes, root)
        self.run(call, flat, flat, timeout_s)

    def all_gather(self, source: Tensor, target: Tensor, timeout_s: float) -> None:
        """Copy these ranks' contiguous tensors, one after the other, into one; done when it returns."""
        call = copy_call(Kind.all_gather, source.dtype, source.nbytes)
        self.run(call, source, target, timeout_s)

    def compare(self, call: Call, timeout_s: float) -> Callable[[], object]:
        """Start comparing a call with those of the other ranks; what is given waits for the outcome."""
        return self.start(call, None, None, timeout_s).wait

    def close(self) -> None:
        """Leave the group; what is in flight fails."""
        self._close()

    def _wait_for(self, work: SharedMemoryWork) -> None:
        # An exception, of a signal's handler say, may end the wait before the collective ends.
        self._kept.keep(work)
        work.wait()

    def _work(
        self,
        operation: Operation,
        call: Call,
        source: Tensor | None,
        target: Tensor | None,
        timeout_s: float,
        results: Sequence[Tensor],
        finish: Callable[[], Any] | None,
    ) -> SharedMemoryWork:
        failed = partial(self._error_for, call, timeout_s)
        kept = (self, source, target)
        return SharedMemoryWork(operation, results, finish, failed, self.futures, kept)

    def _error_for(self, call: Call, timeout_s: float, operation: Operation) -> CommunicationError:
        ranks, local_rank = self.global_ranks, self.neighbours.local_rank
        return error_for(operation.failure(), call, operation.number, ranks, local_rank, timeout_s)


def reduce_call(
    kind: Kind, dtype: torch.dtype, wire: torch.dtype, reduction: tuple[int, float], count: int, root: int
) -> Call:
    """A call that reduces ``count`` elements per rank; ``wire`` is the dtype as the kernel sees it."""
    number, factor = reduction
    if factor == 1.0:
        return _unscaled(kind, dtype, wire, number, count, root)
    return Call(kind, number, TYPES[wire], label_of(dtype), root, 0, count, 0, factor)


@functools.lru_cache  # making one takes longer than a small reduction
def _unscaled(kind: Kind, dtype: torch.dtype, wire: torch.dtype, number: int, count: int, root: int) -> Call:
    return Call(kind, number, TYPES[wire], label_of(dtype), root, 0, count, 0, 1.0)


@functools.lru_cache
def copy_call(kind: Kind, dtype: torch.dtype, nbytes: int, root: int = 0) -> Call:
    """A call that copies `nbytes` (per rank) of a tensor."""
    return Call(kind, 0, BYTES, label_of(dtype), root, 0, nbytes, 0, 1.0)


def elsewhere_call(name: str, tensor: Tensor, numel: int, root: int, reduction: int = 0) -> Call:
    """A call that only compares what ranks are about to do through another group.

    Args:
        name: one of ``ELSEWHERE``.
        tensor: of the dtype that must be equal.
        numel: what must be equal as well; 0 where ranks' sizes may differ.
        root: the root rank, 0 where there is none.
        reduction: its number, where that is compared here.
    """
    detail, label = ELSEWHERE.index(name), label_of(tensor.dtype)
    return Call(Kind.elsewhere, reduction, BYTES, label, root, detail, numel, 0, 1.0)


def _refused(refusal: OSError) -> Exception:
    """What is raised in place of the kernel's refusal to take a call."""
    words = _REFUSALS.get(type(refusal))
    return refusal if words is None else CommunicationError(words)


def _close(kernel: Group, neighbours: Neighbours, futures: Worker) -> None:
    kernel.close()
    neighbours.disconnect()
    futures.stop()
    futures.join()
