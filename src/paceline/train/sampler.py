"""A sampler for loops of one's own: disjoint shares, and another order in every pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized

import torch.distributed as dist
from torch.utils.data import Sampler

from paceline.errors import ArgumentError
from paceline.train.orders import EpochOrder, even_part


class DistributedSampler(Sampler[int]):
    """Drop-in for ``torch.utils.data.distributed.DistributedSampler``.

    Two differences. Each pass counts up the epoch by itself, so that nobody has to call
    `set_epoch` for epochs to differ (calling it works as ever). And no sample is given
    twice: without `drop_last` the ranks' shares may differ by one sample.

    Args:
        dataset: anything with a length.
        num_replicas: ranks; default: the default process group's.
        rank: this one; default: the default process group's.
        shuffle: False gives the data set's own order.
        seed: the same on every rank.
        drop_last: leave out the tail, so that all shares are equal.

    Raises:
        ArgumentError: `rank` is not in [0, num_replicas).
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.dataset = dataset
        self.num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ArgumentError(
                f"rank is {self.rank}, but it must be in [0, {self.num_replicas}) (num_replicas)"
            )
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0

    @property
    def total_size(self) -> int:
        """Samples of one pass over all ranks."""
        size = len(self.dataset)
        return size - size % self.num_replicas if self.drop_last else size

    @property
    def num_samples(self) -> int:
        """Samples of the largest share; loops that must be of one length on all ranks go by it."""
        return math.ceil(self.total_size / self.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; later passes count on from there."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(even_part(self.total_size, self.num_replicas, self.rank))

    def __iter__(self) -> Iterator[int]:
        order = EpochOrder(len(self.dataset), self.seed, self.shuffle)
        order.set_epoch(self.epoch)
        self.epoch += 1
        return iter(order.as_tensor()[self.rank : self.total_size : self.num_replicas].tolist())
