"""What is known of one backward pass while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
        launch_waits: whether a full bucket was left for the next gradient to launch.
        next_launch: index of the first bucket that is not launched.
        flights: collectives under way.
        arrivals: parameters in the order in which their gradients were complete.
        late: buckets that got gradient after their launch.
    """

    number: int
    synchronises: bool
    engaged: bool = False
    standing: Standing = Standing.TOOK_PART
    launch_waits: bool = False
    next_launch: int = 0
    flights: list[Flight] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)
    late: set[int] = field(default_factory=set)
