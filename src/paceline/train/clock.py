"""Where a rank's time goes: data, forward and backward, waiting for others, optimizer.

    with clock.data: ...        next micro-batches
    with clock.compute: ...     forward and backward, less what of it was waiting
    with clock.optimizer: ...   clip, optimizer and schedule

Waiting is what this rank spends in collectives on a CPU. On an accelerator collectives run
beside the rank, so their time is inside forward and backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from paceline.recorder.ring import recorder

PHASES = ("data", "forward and backward", "waiting", "optimizer", "other")


class Phase:
    """A block that is timed every time it runs, and recorded; waiting within it does not count.

    Args:
        name: what the record calls it.
        waited: seconds that this rank has waited so far.
    """

    def __init__(self, name: str, waited: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._name = name
        self._recorder = recorder()
        self._waited = waited
        self._began = 0.0

    def __enter__(self) -> None:
        self._recorder.phase(self._name)
        self._began = time.perf_counter() - self._waited()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += time.perf_counter() - self._waited() - self._began


class Clock:
    """The phases of one run on this rank.

    Args:
        waited: seconds that this rank has waited so far; never falls.
    """

    def __init__(self, waited: Callable[[], float]) -> None:
        self._waited = waited
        self._began, self._waited_before = time.perf_counter(), waited()
        self.data = Phase("loading data", waited)
        self.compute = Phase("forward and backward", waited)
        self.optimizer = Phase("the optimizer's step", waited)

    @property
    def total(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._began

    def shares(self) -> list[float]:
        """Seconds of each of PHASES so far."""
        known = [
            self.data.seconds,
            self.compute.seconds,
            self._waited() - self._waited_before,
            self.optimizer.seconds,
        ]
        return [*known, max(self.total - sum(known), 0.0)]
