"""What passes teach for the next one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.comm.coalesced import broadcast_tensors
from paceline.comm.waiting import Peers
from paceline.engine.plan import registration_order


@dataclass
class Lessons:
    """What passes have taught about one set of trained parameters.

    Attributes:
        order: rank 0's order of arrival, once a pass has shown it.
        trailing: parameters that some pass left unused.
        replan_due: whether the buckets do not follow ``order`` and ``trailing`` yet.
        firings: how often each parameter fired in the last pass.
        graph_changed: whether any pass differed from the one before it.
        users: how many ranks reached each parameter in the last pass; None when all reached all.
        unused: what the last pass left unused on some rank -> number of ranks that used it;
            None once it was checked.
    """

    order: list[int] | None = None
    trailing: frozenset[int] = frozenset()
    replan_due: bool = False
    firings: list[int] | None = None
    graph_changed: bool = False
    users: list[int] | None = None
    unused: dict[int, int] | None = None

    @property
    def graph_is_static(self) -> bool:
        """Whether every synchronising pass so far reached the same parameters equally often."""
        return self.firings is not None and not self.graph_changed


def agree_on_order(
    arrivals: list[int], count: int, peers: Peers, number: int, device: torch.device
) -> list[int]:
    """Rank 0's order of arrival, on every rank; what did not arrive comes last.

    Args:
        arrivals: parameters in the order in which their gradients came on this rank.
        count: number of parameters.
        peers: the ranks.
        number: of the pass, for errors.
        device: of the tensor that travels.
    """
    arrived = set(arrivals)
    missing = [index for index in registration_order(count) if index not in arrived]
    order = torch.tensor(arrivals + missing, device=device)
    broadcast_tensors(
        [order], peers, lambda: f"backward pass {number}, broadcast of rank 0's order of arrival"
    )
    return [int(index) for index in order.tolist()]
