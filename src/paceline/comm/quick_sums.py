"""The shortest way of the commonest call: the sum of one tensor, carried out in the calling thread.

The ranks reduce a small tensor in less time than Python takes to ask for it. So all that can be prepared
is, and of a call only that is looked at which makes it fit for this way; any other takes the general one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.calls import TYPES
from paceline.comm.local import SharedMemory, reduce_call
from paceline.comm.native import Kind, Prepared
from paceline.comm.through_gloo import UNSET, GroupTimeout

_SUM = dist.ReduceOp.SUM


class QuickSums:
    """Sums in place over the ranks of one host.

    Args:
        memory: what they share.
        timeout: how long the others may take.
    """

    MOST = 256  # prepared calls that are kept

    def __init__(self, memory: SharedMemory, timeout: GroupTimeout) -> None:
        self._memory, self._timeout = memory, timeout
        self._run, self._done = memory.run_prepared, memory.done
        self._prepared: dict[tuple[torch.dtype, int, float], tuple[int, Prepared]] = {}

    def all_reduce(self, tensor: Tensor, opts: Any) -> dist.Work | None:
        """Reduce a tensor over all ranks, in place; done when it returns.

        Args:
            tensor: any.
            opts: ``AllreduceOptions``.

        Returns:
            None, and nothing was done, where the call is not one of those that this is for.
        """
        fits = (
            not opts.asyncOp
            and tensor.layout is torch.strided
            and tensor.is_cpu
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and opts.reduceOp == _SUM
            and opts.timeout <= UNSET
        )
        if not fits or tensor.dtype not in TYPES:
            return None
        key = tensor.dtype, tensor.numel(), self._timeout.seconds
        address, prepared = self._prepared.get(key) or self._prepare(*key)
        left = self._run(address, tensor.data_ptr())
        return self._done if left is None else self._memory.finish_prepared(left, prepared, tensor)

    def _prepare(self, dtype: torch.dtype, count: int, timeout_s: float) -> tuple[int, Prepared]:
        if len(self._prepared) == self.MOST:
            self._prepared.pop(next(iter(self._prepared)), None)  # another thread may have been here
        call = reduce_call(Kind.all_reduce, dtype, dtype, (0, 1.0), count, 0)
        prepared = self._memory.prepare(call, timeout_s)
        known = self._prepared[dtype, count, timeout_s] = prepared.address(), prepared
        return known
