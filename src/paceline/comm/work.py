"""torch's ``Work`` and futures over the kernel's operations."""

from __future__ import annotations

import datetime
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.native import Operation, Status
from paceline.errors import CollectiveTimeoutError, CommunicationError

SLICE_S = 0.1  # handlers of signals run between slices
_FOREVER = datetime.timedelta(0)


class FutureKeeper:
    """Completes futures from a thread of its own, started with the first one.

    Note "callbacks of futures": they run in this thread, and may start further collectives and
    wait for their futures (PowerSGD does). Such a future is completed on the spot, not behind
    the one whose callback is running.
    """

    def __init__(self) -> None:
        self._pending: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def complete_later(self, complete: Callable[[], None]) -> None:
        """Call ``complete``, which waits for its work, in the order of these calls."""
        if threading.current_thread() is self._thread:
            complete()
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=_complete_all, args=(self._pending,), name="paceline-futures", daemon=True
            )
            self._thread.start()
        self._pending.put(complete)

    def stop(self) -> None:
        """Let the thread end when it is through."""
        if self._thread is not None:
            self._pending.put(None)


class SharedMemoryWork(dist.Work):
    """A collective of the shared-memory kernel in flight.

    Args:
        operation: the kernel's.
        results: the tensors that hold the result when it is done.
        finish: brings the result into them, if it is elsewhere.
        failed: makes the exception for an operation that failed.
        keeper: completes futures.
        kept: whatever must live until the operation is done.
    """

    def __init__(
        self,
        operation: Operation,
        results: Sequence[Tensor],
        finish: Callable[[], None] | None,
        failed: Callable[[Operation], CommunicationError],
        keeper: FutureKeeper,
        kept: Any,
    ) -> None:
        super().__init__()
        self._operation = operation
        self._results = list(results)
        self._finish = finish
        self._failed = failed
        self._keeper = keeper
        self._kept = kept
        self._lock = threading.Lock()
        self._error: CommunicationError | None = None
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def wait(self, timeout: datetime.timedelta = _FOREVER) -> bool:
        """Wait until the result is there.

        Args:
            timeout: how long; the default is as long as the process group's timeout allows. A wait
                that ends early leaves the collective as it is, and can be repeated.

        Returns:
            True.

        Raises:
            CollectiveTimeoutError: ranks did not come in time (``is_completed()`` then says whether it was
                the collective that gave up, or this wait).
            PeerLostError: the process of a rank is gone.
            RanksOutOfStepError: ranks called different collectives.
        """
        left = timeout.total_seconds()
        forever = left <= 0
        while True:
            status = self._operation.wait(SLICE_S if forever else min(left, SLICE_S))
            if status != Status.PENDING:
                return self._conclude(status)
            if not forever:
                left -= SLICE_S
                if left <= 0:
                    raise CollectiveTimeoutError(f"this wait timed out after {timeout.total_seconds():g} s")

    def is_completed(self) -> bool:
        """Whether it is done or failed."""
        return self._operation.status() != Status.PENDING

    def is_success(self) -> bool:
        """Whether it is done and did not fail."""
        return self._operation.status() == Status.OK

    def synchronize(self) -> None:
        """The same as ``wait``."""
        self.wait()

    def result(self) -> list[Tensor]:
        """The tensors that hold the result; waits for it."""
        self.wait()
        return self._results

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future of the list of result tensors. Its callbacks run in a thread of the process group."""
        with self._lock:
            if self._future is not None:
                return self._future
            trigger: torch.futures.Future[None] = torch.futures.Future()
            # An exception raised in a callback reaches waiters in C++ as well, unlike one that is set.
            self._future = trigger.then(lambda _: self.result())
        if self.is_completed():
            trigger.set_result(None)
        else:
            self._keeper.complete_later(lambda: self._trigger(trigger))
        return self._future

    def _trigger(self, trigger: torch.futures.Future[None]) -> None:
        try:
            self.wait()
        except CommunicationError:
            pass  # the future's callback meets it again
        trigger.set_result(None)

    def _conclude(self, status: int) -> bool:
        with self._lock:
            if status != Status.OK:
                self._error = self._error or self._failed(self._operation)
                raise self._error
            if self._finish is not None:
                finish, self._finish = self._finish, None
                with torch.no_grad():
                    finish()
            self._kept = None
        return True


class JoinedWork(dist.Work):
    """Several works as one.

    Args:
        works: at least one, of one process group.
    """

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: datetime.timedelta = _FOREVER) -> bool:
        """Wait for all of them."""
        return all([work.wait(timeout) for work in self._works])

    def is_completed(self) -> bool:
        """Whether all are done or failed."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all are done and none failed."""
        return all(work.is_success() for work in self._works)

    def synchronize(self) -> None:
        """The same as ``wait``."""
        self.wait()

    def result(self) -> list[Tensor]:
        """All result tensors."""
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future of all result tensors."""
        futures = torch.futures.collect_all([work.get_future() for work in self._works])
        return futures.then(lambda all_: [tensor for one in all_.value() for tensor in one.value()])


def _complete_all(pending: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (complete := pending.get()) is not None:
        complete()
