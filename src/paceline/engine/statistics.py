"""How long the phases of a step take on this rank, and the last error: what torch calls logging data.

It is told of every phase, and so hands them on to this rank's record.

A few clock readings a step, in nanoseconds. As in torch, every step is kept for the first
ten and every ``sample_rate``-th afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from paceline.recorder.layout import Kind
from paceline.recorder.ring import Recorder, recorder

ALWAYS_KEPT = 10


@dataclass
class StepTimes:
    """Clock readings of one step, in nanoseconds since the epoch; 0 where it did not come so far."""

    forward_start: int = 0
    backward_start: int = 0
    first_launch: int = 0
    backward_end: int = 0
    communication_end: int = 0

    def phases(self) -> dict[str, int]:
        """Durations under torch's names, in nanoseconds."""
        overlap = max(0, self.backward_end - self.first_launch)
        return {
            "forward_compute_time": self.backward_start - self.forward_start,
            "backward_compute_time": self.backward_end - self.backward_start,
            "backward_comm_time": self.communication_end - self.first_launch,
            "backward_compute_comm_overlap_time": overlap,
        }

    def moments(self) -> dict[str, int]:
        """Clock readings under torch's names."""
        return {
            "forward_compute_time_start": self.forward_start,
            "backward_compute_time_start": self.backward_start,
            "backward_comm_time_start": self.first_launch,
            "backward_compute_time_end": self.backward_end,
            "backward_comm_time_end": self.communication_end,
        }


@dataclass
class RunStatistics:
    """Times of the sampled steps of one wrapper.

    Attributes:
        sample_rate: behind the first ten steps, one in so many is kept.
        steps: number of training forwards that were to synchronise.
        kept: what the last sampled step took, by name; empty before the second step.
        error: the last error raised to the user, empty if there was none.
        uneven_inputs: whether the wrapper took part in a ``join``.
        buckets_reduced: number of buckets all-reduced in the last pass.
    """

    sample_rate: int = 100
    steps: int = 0
    kept: dict[str, int] = field(default_factory=dict)
    error: str = ""
    uneven_inputs: bool = False
    buckets_reduced: int = 0
    _now: StepTimes = field(default_factory=StepTimes)
    _sums: dict[str, int] = field(default_factory=dict)
    _samples: int = 0
    _recorder: Recorder = field(default_factory=recorder)

    def forward_begins(self, number: int) -> None:
        """A forward starts whose backward may be part of the ``number``-th pass."""
        self._recorder.add(Kind.FORWARD, number)

    def forward_ends(self, number: int) -> None:
        """The module's forward is through."""
        self._recorder.add(Kind.FORWARD_ENDED, number)

    def step_begins(self) -> None:
        """A training forward starts: keep what the step before it took, if it is sampled."""
        if self.steps and (self.steps < ALWAYS_KEPT or self.steps % self.sample_rate == 0):
            self._keep()
        self.steps += 1
        self._now = StepTimes(forward_start=time.time_ns())

    def backward_begins(self, number: int) -> None:
        """The first sign of a backward; it, or the next that synchronises, is the ``number``-th."""
        self._recorder.add(Kind.BACKWARD, number)
        self._now.backward_start = time.time_ns()

    def launched(self, number: int, bucket: Hashable, words: Callable[[], str]) -> None:
        """A bucket was launched.

        Args:
            number: of the pass.
            bucket: stands for the bucket of its plan.
            words: gives its name and its parameters', called at its first launch.
        """
        self._recorder.add(Kind.LAUNCHED, number, self._recorder.name_of(bucket, words))
        self._now.first_launch = self._now.first_launch or time.time_ns()

    def backward_ends(self, number: int) -> None:
        """All gradients of this rank are there."""
        self._recorder.add(Kind.BACKWARD_ENDED, number)
        self._now.backward_end = time.time_ns()

    def communication_ends(self, number: int, buckets_reduced: int) -> None:
        """All averages of the ``number``-th pass are there."""
        self._recorder.add(Kind.PASS_FINISHED, number)
        self._now.communication_end = time.time_ns()
        self.buckets_reduced = buckets_reduced

    def note(self, error: Exception) -> Exception:
        """Remember an error that is about to be raised; returns it."""
        self.error = str(error)
        return error

    def _keep(self) -> None:
        phases = self._now.phases()
        self._samples += 1
        for name, duration in phases.items():
            self._sums[name] = self._sums.get(name, 0) + duration
        averages = {f"avg_{name}": total // self._samples for name, total in self._sums.items()}
        self.kept = {"iteration": self.steps, **phases, **self._now.moments(), **averages}
