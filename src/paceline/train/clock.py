"""Where a rank's time goes: data, forward and backward, waiting for others, optimizer, evaluation and saving.

    with clock.data: ...        next micro-batches
    with clock.compute: ...     forward and backward, less what of it was waiting
    with clock.optimizer: ...   clip, optimizer and schedule
    with clock.evaluation: ...  evaluations
    with clock.saving: ...      checkpoints, as far as training waits for them

Waiting is what this rank spends in collectives on a CPU. On an accelerator collectives run
beside the rank, so their time is inside forward and backward.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Protocol

from paceline.recorder.ring import recorder

PHASES = ("data", "forward and backward", "waiting", "optimizer", "evaluation and saving", "other")


class Waiter(Protocol):
    """Whatever waits for other ranks, and knows for how long so far."""

    @property
    def waited_s(self) -> float:
        """Seconds; never falls."""


class Phase:
    """A block that is timed every time it runs, and recorded; waiting within it does not count.

    Args:
        name: what the record calls it.
        waiters: what waits for other ranks on this rank.
    """

    def __init__(self, name: str, waiters: list[Waiter]) -> None:
        self.seconds = 0.0
        self._name, self._recorder = name, recorder()
        self._waiters = waiters
        self._began = 0.0

    def __enter__(self) -> None:
        self._recorder.phase(self._name)
        self._began = time.perf_counter() - _waited(self._waiters)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += time.perf_counter() - _waited(self._waiters) - self._began


class Clock:
    """The phases of one run on this rank.

    Args:
        waiters: what waits for other ranks on this rank.
    """

    def __init__(self, waiters: list[Waiter]) -> None:
        self._waiters = waiters
        self._began, self._waited_before = time.perf_counter(), _waited(waiters)
        self.data = Phase("loading data", waiters)
        self.compute = Phase("forward and backward", waiters)
        self.optimizer = Phase("the optimizer's step", waiters)
        self.evaluation = Phase("evaluation", waiters)
        self.saving = Phase("saving a checkpoint", waiters)

    def watch(self, wrapper: Any) -> None:
        """Count what a wrapper waits as well, if it says so (paceline's does), from its making on."""
        peers = getattr(getattr(wrapper, "reducer", None), "peers", None)
        if peers is not None:
            self._waiters.append(peers)

    @property
    def total(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._began

    def shares(self) -> list[float]:
        """Seconds of each of PHASES so far."""
        known = [
            self.data.seconds,
            self.compute.seconds,
            _waited(self._waiters) - self._waited_before,
            self.optimizer.seconds,
            self.evaluation.seconds + self.saving.seconds,
        ]
        return [*known, max(self.total - sum(known), 0.0)]


def _waited(waiters: list[Waiter]) -> float:
    seconds = 0.0
    for each in waiters:
        seconds += each.waited_s
    return seconds
