"""How the layers of a module exchange batch statistics while the wrapper exchanges gradients.

Statistics travel in a process group that nothing else uses (``comm/private_group.py`` says why). It
is made at the first training forward, once for each group of ranks.

Note "exact rows": each rank writes its row into a matrix of zeros, and the sum of the matrices holds
every row exactly, whatever the order of addition. All ranks then combine the same bits in the same
way, so that running statistics cannot drift apart.

Note "after an exception": a rank whose backward raised never comes to the collectives of the layers
that are left, and would meet its peers there with those of its next forward. So the reducer calls
``StatisticsExchange.abandon`` as soon as it knows: ranks that wait are told, and the next forward makes
a new group on all ranks.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.private_group import private_group
from paceline.comm.waiting import Peers
from paceline.errors import PeerFailedError


class StatisticsExchange:
    """Sums over ranks, in a process group that nothing else uses.

    Args:
        base: the ranks that take part; all of them must come here together.
        device: of the tensors that will be exchanged first.
    """

    _open: ClassVar[dict[int, StatisticsExchange]] = {}

    def __init__(self, base: dist.ProcessGroup, device: torch.device) -> None:
        self._group = private_group(base, device, "batch_statistics", owner=self)
        self._peers = _ExchangePeers(self._group)

    @classmethod
    def over(cls, base: dist.ProcessGroup, device: torch.device) -> StatisticsExchange:
        """The exchange of these ranks, made at the first call; it goes when ``base`` does."""
        key = id(base)
        if key not in cls._open:
            cls._open[key] = cls(base, device)
            weakref.finalize(base, cls._open.pop, key, None).atexit = False
        return cls._open[key]

    @classmethod
    def abandon(cls) -> None:
        """Give up every exchange, since this pass failed on some rank; the next forward makes new ones.

        All ranks must do so after the same pass: the one whose backward raised, which so frees those that
        wait for it, and those that were told.
        """
        while cls._open:
            cls._open.popitem()[1]._peers.tell_abandoned()

    def rows(self, mine: Tensor, what: str) -> Tensor:
        """Every rank's 1-d tensor, exactly, as the rows of a matrix in rank order."""
        table = mine.new_zeros(self._peers.world_size, mine.numel())
        table[self._peers.rank] = mine
        return self.add_up(table, what)

    def add_up(self, tensor: Tensor, what: str) -> Tensor:
        """``tensor`` itself, holding the sum over all ranks.

        Raises:
            CommunicationError: another rank did not come, or is gone.
        """
        begin = partial(dist.all_reduce, tensor, group=self._group, async_op=True)
        self._peers.run(begin, tensor.device, lambda: what)
        return tensor


class _ExchangePeers(Peers):
    """Ranks that may also be told, while they wait, that the pass has failed elsewhere."""

    def tell_abandoned(self) -> None:
        """Have the ranks that wait in this exchange raise; the first rank that tells is named."""
        self._quietly(lambda: self._store.compare_set("abandoned", "", str(self.global_rank)))

    def _look_around(self, what: str) -> None:
        culprit = self._read("abandoned")
        if culprit is not None:
            raise PeerFailedError(
                f"rank {self.global_rank}: {what} failed, because backward raised an exception on "
                f"rank {culprit}; it stands in that rank's output. This pass has no gradients on any rank."
            )
        super()._look_around(what)
