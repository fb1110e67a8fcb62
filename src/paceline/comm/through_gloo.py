"""Collectives that Gloo carries out for ranks which share memory, after comparing what each rank calls.

Gloo itself does not notice that ranks call different collectives: it waits, or mixes their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from paceline.comm.local import SharedMemory, elsewhere_call
from paceline.comm.work import TaskWork, Worker


class ComparedCalls:
    """Runs Gloo's collectives in their order, each once all ranks have called the same.

    Args:
        memory: through which the ranks compare; of all ranks of the group.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._worker = Worker("paceline-gloo")

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
        compared = self._memory.start(elsewhere_call(name, tensor, numel, root), None, None, timeout_s)

        def carry_out() -> None:
            compared.wait()
            begin().wait()

        return TaskWork(self._worker, carry_out, results)

    def close(self) -> None:
        """Start nothing more."""
        self._worker.stop()
