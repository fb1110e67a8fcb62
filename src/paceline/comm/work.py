"""torch's ``Work`` and futures over the kernel's operations."""

from __future__ import annotations

import datetime
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.native import Operation, Status
from paceline.errors import CollectiveTimeoutError, CommunicationError
from paceline.recorder.ring import recorder

CLOSED = "this process group was shut down; make a new one"
SLICE_S = 0.1  # handlers of signals run between slices
LEAVE_S = 2.0  # for a job that is nearly through; what waits for other ranks may wait for long
_FOREVER = datetime.timedelta(0)


class Worker:
    """Runs jobs one after the other in a thread of its own, started with the first one.

    Note "callbacks of futures": they run in this thread, and may start further collectives and
    wait for their futures (PowerSGD does). Such a job is done on the spot, not behind the one
    whose callback is running.

    Note "leaving": a thread that comes back to the interpreter while that shuts down is ended where it
    stands; if that is in the middle of C++, as it is in a future's callback, the process aborts. So
    the thread is waited for before, when the group is left and when the interpreter begins to exit.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pending: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def run_later(self, job: Callable[[], None]) -> None:
        """Run ``job``, which must not raise, after those given earlier.

        Raises:
            CommunicationError: the worker was stopped.
        """
        if threading.current_thread() is self._thread:
            job()
            return
        if self._stopped:
            raise CommunicationError(CLOSED)
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run_all, args=(self._pending,), name=self._name, daemon=True
            )
            self._thread.start()
            weakref.finalize(self, _end, self._pending, self._thread)
        self._pending.put(job)

    def stop(self) -> None:
        """Take no more jobs, and let the thread end when it is through."""
        self._stopped = True
        self._pending.put(None)

    def join(self) -> None:
        """After ``stop``: wait until the thread has ended, unless it is stuck in a job."""
        if self._thread is not None:
            _end(self._pending, self._thread)


class KeptWorks:
    """The works that must live although nobody may hold them.

    A caller may drop its work at once; memory in use must live on all the same.

    Note "half a work": C++ that keeps a work made in Python, as torch's DDP does while ranks join, keeps
    the C++ half alone. Without the other half its ``wait`` waits for ever. So the latest works that nobody
    waited for are kept when they are done, too.
    """

    LATEST = 16

    def __init__(self) -> None:
        self._works: list[SharedMemoryWork | TaskWork] = []

    def keep(self, work: SharedMemoryWork | TaskWork) -> None:
        """Keep a work until it is done, and, unless it is waited for, somewhat longer."""
        over = [(one, one.is_completed()) for one in self._works]
        in_flight = [one for one, is_over in over if not is_over]
        done = [one for one, is_over in over if is_over and not one.claimed]
        self._works = [*done[-self.LATEST :], *in_flight, work]


class SharedMemoryWork(dist.Work):
    """A collective of the shared-memory kernel in flight.

    Args:
        operation: the kernel's.
        results: the tensors that hold the result when it is done.
        finish: brings the result into them, if it is elsewhere.
        failed: makes the exception for an operation that failed.
        futures: completes futures.
        kept: whatever must live until the operation is done.

    Attributes:
        claimed: whether somebody waited for it, or asked for its future.
    """

    def __init__(
        self,
        operation: Operation,
        results: Sequence[Tensor],
        finish: Callable[[], Any] | None,
        failed: Callable[[Operation], CommunicationError],
        futures: Worker,
        kept: Any,
    ) -> None:
        super().__init__()
        self._operation = operation
        self._results = list(results)
        self._finish = finish
        self._failed = failed
        self._futures = futures
        self._kept = kept
        self.claimed = False
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
        if left <= 0:
            return self._wait_for_ranks()
        while (status := self._operation.wait(min(left, SLICE_S))) == Status.PENDING:
            left -= SLICE_S
            if left <= 0:
                raise CollectiveTimeoutError(f"this wait timed out after {timeout.total_seconds():g} s")
        return self._conclude(status)

    def _wait_for_ranks(self) -> bool:
        with recorder().waiting:
            while (status := self._operation.wait(SLICE_S)) == Status.PENDING:
                pass
            return self._conclude(status)

    def is_completed(self) -> bool:
        """Whether it is done or failed."""
        return self._kept is None or self._operation.status() != Status.PENDING

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
        self.claimed = True
        with self._lock:
            if self._future is not None:
                return self._future
            trigger: torch.futures.Future[None] = torch.futures.Future()
            # An exception raised in a callback reaches waiters in C++ as well, unlike one that is set.
            self._future = trigger.then(lambda _: self.result())
        if self.is_completed():
            trigger.set_result(None)
        else:
            self._futures.run_later(lambda: self._trigger(trigger))
        return self._future

    def _trigger(self, trigger: torch.futures.Future[None]) -> None:
        try:
            self.wait()
        except CommunicationError:
            pass  # the future's callback meets it again
        trigger.set_result(None)

    def _conclude(self, status: int) -> bool:
        self.claimed = True
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


class DoneWork(dist.Work):
    """A collective that was done when its call returned.

    torch makes such calls where ``async_op`` is not asked for, and looks at nothing but ``wait``; it takes
    None in its place as well. So it knows of no result.
    """

    def wait(self, timeout: datetime.timedelta = _FOREVER) -> bool:
        """True, at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True

    def synchronize(self) -> None:
        """Nothing is left to wait for."""

    def result(self) -> list[Tensor]:
        """Nothing."""
        return []

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future that is done."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([])
        return future


class TaskWork(dist.Work):
    """A collective made of several steps, carried out by a worker.

    Args:
        worker: runs it.
        steps: brings the result into the tensors; raises when that fails.
        results: the tensors that hold the result when it is done.

    Attributes:
        claimed: whether somebody waited for it, or asked for its future.
    """

    def __init__(self, worker: Worker, steps: Callable[[], None], results: Sequence[Tensor]) -> None:
        super().__init__()
        self._results = list(results)
        self.claimed = False
        self._done = threading.Event()
        self._error: Exception | None = None
        self._trigger: torch.futures.Future[None] = torch.futures.Future()
        self._future = self._trigger.then(lambda _: self.result())
        worker.run_later(partial(self._carry_out, steps))

    def wait(self, timeout: datetime.timedelta = _FOREVER) -> bool:
        """Wait until the result is there; ``SharedMemoryWork.wait`` says what is raised."""
        seconds = timeout.total_seconds()
        if seconds > 0:
            if not self._done.wait(seconds):
                raise CollectiveTimeoutError(f"this wait timed out after {seconds:g} s")
            return self._conclude()
        with recorder().waiting:
            self._done.wait()
            return self._conclude()

    def is_completed(self) -> bool:
        """Whether it is done or failed."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether it is done and did not fail."""
        return self._done.is_set() and self._error is None

    def _conclude(self) -> bool:
        self.claimed = True
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """The same as ``wait``."""
        self.wait()

    def result(self) -> list[Tensor]:
        """The tensors that hold the result; waits for it."""
        self.wait()
        return self._results

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future of the list of result tensors. Its callbacks run in the worker's thread."""
        self.claimed = True
        return self._future

    def _carry_out(self, steps: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                steps()
        except Exception as error:
            self._error = error
        self._done.set()
        self._trigger.set_result(None)


class CopiedWork(dist.Work):
    """A call of another group, whose result is then brought to where it belongs.

    Args:
        work: that group's.
        finish: brings the result there, if it is elsewhere; called once, by the first that waits.
        results: the tensors that hold the result then.
    """

    def __init__(self, work: dist.Work, finish: Callable[[], Any] | None, results: Sequence[Tensor]) -> None:
        super().__init__()
        self._work, self._finish, self._results = work, finish, list(results)
        self._lock = threading.Lock()

    def wait(self, timeout: datetime.timedelta = _FOREVER) -> bool:
        """Wait until the result is there; raises what the other group's wait does."""
        self._work.wait(timeout)
        with self._lock, torch.no_grad():
            if self._finish is not None:
                finish, self._finish = self._finish, None
                finish()
        return True

    def is_completed(self) -> bool:
        """Whether it is done or failed; the result is in its place after ``wait``."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Whether it is done and did not fail."""
        return self._work.is_success()

    def synchronize(self) -> None:
        """The same as ``wait``."""
        self.wait()

    def result(self) -> list[Tensor]:
        """The tensors that hold the result; waits for it."""
        self.wait()
        return self._results

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future of the list of result tensors."""
        return self._work.get_future().then(lambda _: self.result())

    def _source_rank(self) -> int:
        return self._work._source_rank()


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
        for work in self._works:
            work.wait(timeout)
        return True

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


def joined(works: Sequence[dist.Work]) -> dist.Work:
    """At least one work, as one."""
    return works[0] if len(works) == 1 else JoinedWork(works)


def _run_all(pending: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := pending.get()) is not None:
        job()
        del job  # or what it holds would live until the next one


def _end(pending: queue.SimpleQueue[Callable[[], None] | None], thread: threading.Thread) -> None:
    if threading.current_thread() is not thread:
        pending.put(None)
        thread.join(LEAVE_S)
