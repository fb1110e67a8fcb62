"""What the ranks of one host share, and the collectives they have in flight."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from paceline.comm.calls import BYTES, TYPES, error_for, label_of, reduction_of
from paceline.comm.hosts import Neighbours
from paceline.comm.native import NOWHERE, Call, Group, Kind, Operation
from paceline.comm.work import SharedMemoryWork, Worker
from paceline.errors import CommunicationError


class SharedMemory:
    """What the ranks of one host share, and the operations in flight.

    Args:
        neighbours: the host's ranks, connected.
        global_ranks: their ranks in the whole job, for messages.
    """

    def __init__(self, neighbours: Neighbours, global_ranks: list[int]) -> None:
        self.neighbours = neighbours
        self.global_ranks = global_ranks
        self.arena = neighbours.arena
        self.futures = Worker("paceline-futures")
        self._kernel = neighbours.open()
        self._in_flight: deque[SharedMemoryWork] = deque()
        self._close = weakref.finalize(self, _close, self._kernel, neighbours, self.futures)
        self._close.atexit = False

    def start(
        self,
        call: Call,
        source: Tensor | None,
        target: Tensor | None,
        timeout_s: float,
        begin_now: bool,
        results: Sequence[Tensor] = (),
        finish: Callable[[], Any] | None = None,
    ) -> SharedMemoryWork:
        """Queue a collective on contiguous tensors.

        Args:
            call: what to do; its ``place`` is filled in here.
            source: the input.
            target: the output, may be the input.
            timeout_s: how long the other ranks may take.
            begin_now: begin before anybody waits for it.
            results: what the work's future yields.
            finish: called once when it is done, to bring the result where it belongs.
        """
        if not self._close.alive:
            raise CommunicationError("this process group was shut down; make a new one")
        begin = source.data_ptr() if source is not None else 0
        call.place = NOWHERE
        if source is not None and source.numel():
            call.place = self.arena.place_of(begin, source.nbytes)
        end = target.data_ptr() if target is not None else 0
        try:
            operation = self._kernel.submit(call, begin, end, timeout_s, begin_now)
        except ChildProcessError:
            raise CommunicationError(
                "a forked process cannot use its parent's process group; start workers that need "
                "collectives before init_process_group, or with the spawn method"
            ) from None
        failed = partial(self._error_for, call, timeout_s)
        kept = (self, source, target)
        work = SharedMemoryWork(operation, results, finish, failed, self.futures, kept)
        if begin_now:
            self._keep_until_done(work)
        return work

    def all_reduce(self, flat: Tensor, op: Any, timeout_s: float) -> None:
        """Reduce a contiguous tensor over these ranks, in place; done when it returns."""
        reduction = reduction_of(op, flat.dtype)
        assert reduction is not None
        call = reduce_call(Kind.all_reduce, flat, flat, reduction, flat.numel(), 0)
        self.start(call, flat, flat, timeout_s, begin_now=False).wait()

    def broadcast(self, flat: Tensor, root: int, timeout_s: float) -> None:
        """Copy the contiguous tensor of one of these ranks into the others'; done when it returns."""
        call = copy_call(Kind.broadcast, flat, flat.nbytes, root)
        self.start(call, flat, flat, timeout_s, begin_now=False).wait()

    def close(self) -> None:
        """Leave the group; what is in flight fails."""
        self._close()

    def _keep_until_done(self, work: SharedMemoryWork) -> None:
        """A caller may drop its work at once: memory in use must live on all the same."""
        while self._in_flight and self._in_flight[0].is_completed():
            self._in_flight.popleft()
        self._in_flight.append(work)

    def _error_for(self, call: Call, timeout_s: float, operation: Operation) -> CommunicationError:
        ranks, local_rank = self.global_ranks, self.neighbours.local_rank
        return error_for(operation.failure(), call, operation.number, ranks, local_rank, timeout_s)


def reduce_call(
    kind: Kind, tensor: Tensor, wire: Tensor, reduction: tuple[int, float], count: int, root: int
) -> Call:
    """A call that reduces ``count`` elements per rank; ``wire`` is the tensor as the kernel sees it."""
    number, factor = reduction
    return Call(kind, number, TYPES[wire.dtype], label_of(tensor.dtype), root, 0, count, NOWHERE, factor)


def copy_call(kind: Kind, tensor: Tensor, nbytes: int, root: int = 0) -> Call:
    """A call that copies `nbytes` (per rank) of a tensor."""
    return Call(kind, 0, BYTES, label_of(tensor.dtype), root, 0, nbytes, NOWHERE, 1.0)


def _close(kernel: Group, neighbours: Neighbours, futures: Worker) -> None:
    kernel.close()
    neighbours.disconnect()
    futures.stop()
