"""What is known of one backward pass while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from paceline.engine.bucket import Slot
from paceline.engine.usage import Standing


@dataclass
class Flight:
    """One collective under way: whether it is done, how to wait for it, what to do once it is."""

    done: Callable[[], bool]
    wait: Callable[[], Any]
    land: Callable[[], None]


@dataclass
class BackwardPass:
    """One backward pass of this rank.

    Attributes:
        number: counts the synchronising passes of the wrapper, from 1.
        synchronises: whether its gradients are averaged; fixed when backward starts.
        engaged: whether it accumulates gradients at all (``autograd.grad`` does not).
        standing: how this rank stands in it.
        next_launch: index of the first bucket that is not launched.
        flights: collectives under way.
        arrivals: parameters in the order in which their gradients were complete.
        late: buckets that got gradient after their launch.
    """

    number: int
    synchronises: bool
    engaged: bool = False
    standing: Standing = Standing.TOOK_PART
    next_launch: int = 0
    flights: list[Flight] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)
    late: set[int] = field(default_factory=set)

    def take_in(self, arrived: Iterable[Slot]) -> None:
        """Count gradients that have arrived, in order.

        Args:
            arrived: one slot for each time that a gradient was accumulated.
        """
        for slot in arrived:
            self.engaged = slot.reached = True
            slot.firings += 1
            bucket = slot.bucket
            if bucket.launched:
                self.late.add(bucket.index)
            elif slot.firings == slot.expected_firings:
                self.arrivals.append(slot.index)
                bucket.pending -= 1
                bucket.last = slot
