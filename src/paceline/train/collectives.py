"""The small sums that the loop itself needs, waited for in slices and explained when they fail."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from paceline.comm.waiting import Peers


class Collectives:
    """All-reduces over the default process group, whose timeout bounds them.

    Args:
        where: says where training stands, as in "step 12", for the error.

    Attributes:
        rank, world_size: this rank, and how many take part.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        self._where = where
        group = dist.group.WORLD
        assert group is not None  # TrainingArguments brought it up
        self._peers = Peers(group)
        self.rank, self.world_size = self._peers.global_rank, self._peers.world_size

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited so far."""
        return self._peers.waited_s

    def sum(self, value: Tensor, what: str) -> Tensor:
        """Add `value` up over all ranks, in place.

        Args:
            value: on this rank's device; of one shape and dtype on all ranks.
            what: what it is for, for the error.

        Returns:
            `value`, the same on every rank.

        Raises:
            CollectiveTimeoutError: a rank did not come in time; it is named.
            PeerLostError: a rank is gone; it is named.
        """
        return self._reduce(value, what, dist.ReduceOp.SUM)

    def max(self, value: Tensor, what: str) -> Tensor:
        """The same with the largest of the ranks' values."""
        return self._reduce(value, what, dist.ReduceOp.MAX)

    def gather(self, value: Tensor, what: str) -> Tensor:
        """The values of all ranks, of shape (ranks, *value.shape), the same on every rank."""
        everyone = value.new_zeros((self.world_size, *value.shape))
        everyone[self.rank] = value
        return self.sum(everyone, what)

    def scatter(self, parts: list[Tensor], own: Tensor, what: str) -> Tensor:
        """Give each rank its part of what rank 0 has.

        Args:
            parts: by rank, on rank 0; empty elsewhere. All of one shape and dtype.
            own: receives this rank's part, in place.
            what: what it is for, for the error.

        Returns:
            `own`.

        Raises:
            CollectiveTimeoutError, PeerLostError: as `sum`.
        """
        self._peers.run(
            lambda: dist.scatter(own, parts or None, async_op=True),
            own.device,
            lambda: f"{what} ({self._where()})",
        )
        return own

    def _reduce(self, value: Tensor, what: str, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world_size == 1:
            return value  # each of these operations leaves a single rank's value as it is
        work = dist.all_reduce(value, op=op, async_op=True)
        if value.device.type == "cpu":
            self._peers.wait(work, lambda: f"{what} ({self._where()})")
        else:
            work.wait()
        return value
