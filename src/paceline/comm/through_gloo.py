"""The Gloo group inside an shm group: what it carries out, and what it stands for.

Gloo itself does not notice that ranks call different collectives: it waits, or mixes their bytes. So
ranks that share memory compare their calls before Gloo sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.arena import Arena
from paceline.comm.local import elsewhere_call
from paceline.comm.native import Call
from paceline.comm.work import TaskWork, Worker


@dataclass
class GroupTimeout:
    """How long collectives that start from now on wait for the other ranks."""

    seconds: float


class InnerGloo(dist.ProcessGroupGloo):
    """The backend that torch finds when it asks an shm group for one; it speaks for the whole group.

    Args:
        store: shared by exactly these ranks.
        rank: this rank in the group.
        size: number of ranks.
        timeout: how long a collective waits for the others.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, timeout=timeout)
        self.group_timeout = GroupTimeout(timeout.total_seconds())
        self.arena: Arena | None = None  # set by the group once ranks share memory

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether ``allocate_tensor`` serves this device. FSDP2 asks here, if told to."""
        return self.arena is not None and torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As of the group."""
        assert self.arena is not None
        return self.arena.allocate(size, dtype)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        super()._set_default_timeout(timeout)
        self.group_timeout.seconds = timeout.total_seconds()


class ComparedCalls:
    """Runs Gloo's collectives in their order, each once all ranks have called the same.

    Args:
        worker: runs them.
        compare: starts comparing a call with those of the other ranks, which may take so many seconds to
            make theirs; gives what waits for the outcome, and raises unless all are alike.
    """

    def __init__(self, worker: Worker, compare: Callable[[Call, float], Callable[[], object]]) -> None:
        self._worker = worker
        self._compare = compare

    def start(
        self,
        name: str,
        tensor: Tensor,
        numel: int,
        root: int,
        timeout_s: float,
        begin: Callable[[], dist.Work],
        results: Sequence[Tensor],
    ) -> dist.Work:
        """Start a collective; ``elsewhere_call`` says what of it is compared.

        Args:
            name: one of ``ELSEWHERE``.
            tensor: of the dtype that must be equal.
            numel: what must be equal as well.
            root: the root rank.
            timeout_s: how long the other ranks may take to call theirs.
            begin: starts it on Gloo.
            results: the tensors that hold the result when it is done.
        """
        compared = self._compare(elsewhere_call(name, tensor, numel, root), timeout_s)

        def carry_out() -> None:
            compared()
            begin().wait()

        return TaskWork(self._worker, carry_out, results)

    def stop(self) -> None:
        """Start nothing more."""
        self._worker.stop()

    def join(self) -> None:
        """After ``stop``: wait for what is nearly through."""
        self._worker.join()
