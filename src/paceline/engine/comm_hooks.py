"""How a bucket is reduced: averaging by default, or a communication hook of the user.

A hook has torch's contract, ``(state, bucket) -> torch.futures.Future[Tensor]``, so
torch.distributed.algorithms.ddp_comm_hooks (fp16, bf16, PowerSGD, post-local SGD,
quantization) serve unchanged. A hook gets undivided local gradients and divides itself.

Note "averaging": float32 and wider are summed and divided by the process group where it
can (ReduceOp.AVG), by us afterwards where it cannot. float16 and bfloat16 are divided
before the sum, so that it cannot overflow: |sum of x/W| <= max |x|.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from paceline.engine.bucket import LOW_PRECISION, GradBucket

Hook = Callable[[Any, Any], "torch.futures.Future[Tensor]"]  # (state, GradBucket) -> the reduced buffer


@dataclass(frozen=True)
class CommHook:
    """A registered hook.

    Attributes:
        function: ``(state, bucket) -> torch.futures.Future[Tensor]``.
        state: passed to every call.
        name: what it is called in messages and logging data.
    """

    function: Hook
    state: Any
    name: str


BUILT_IN_HOOKS = {
    dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}


class Averaging:
    """Averages tensors over the ranks of a group, in place.

    Args:
        group: the ranks that take part.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._world_size = dist.get_world_size(group)
        self._group_can_average = True

    def start(self, tensor: Tensor, divisor: int | None = None) -> dist.Work:
        """Start averaging ``tensor``.

        Args:
            tensor: any float or complex dtype, dense or sparse COO; the collective owns it until done.
            divisor: what the sum is divided by, the world size unless given.

        Returns:
            The work in flight; when it is done, call ``complete`` on the tensor.
        """
        if divisor is not None or self._divides_first(tensor):
            tensor.div_(divisor or self._world_size)
            return self._all_reduce(tensor, dist.ReduceOp.SUM)
        if self._group_can_average:
            try:
                return self._all_reduce(tensor, dist.ReduceOp.AVG)
            except (RuntimeError, ValueError):  # refused before anything was sent, on all ranks alike
                self._group_can_average = False
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def complete(self, tensor: Tensor, divisor: int | None = None) -> None:
        """What is left to do once the work is done."""
        if divisor is None and not self._group_can_average and not self._divides_first(tensor):
            tensor.div_(self._world_size)

    def _divides_first(self, tensor: Tensor) -> bool:
        return tensor.is_sparse or tensor.dtype in LOW_PRECISION

    def _all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> dist.Work:
        work: dist.Work = dist.all_reduce(tensor, op=op, group=self._group, async_op=True)
        return work


def check_hook(hook: Hook) -> None:
    """Refuse a hook that cannot serve.

    Raises:
        TypeError: it is not callable.
        ValueError: its annotations are not ``(state, bucket: GradBucket) -> Future[Tensor]``.
    """
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    signature = _signature_of(hook)
    bucket = signature.parameters.get("bucket")
    if bucket is not None and not _says(bucket.annotation, (dist.GradBucket, GradBucket)):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    if not _says(signature.return_annotation, (torch.futures.Future[torch.Tensor],)):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]."
        )


def name_of_hook(hook: Hook) -> str:
    """What a hook is called in messages: a function's name, or the class of another callable."""
    function = hook.func if isinstance(hook, functools.partial) else hook
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _signature_of(hook: Hook) -> inspect.Signature:
    """With annotations as objects, or as text where they name what exists for type checkers only."""
    try:
        return inspect.signature(hook, eval_str=True)
    except (NameError, AttributeError, TypeError, SyntaxError):
        return inspect.signature(hook)
    except ValueError:  # a callable written in C may have none
        return inspect.Signature()


def _says(annotation: Any, expected: Sequence[Any]) -> bool:
    """Whether an annotation is missing, is one of ``expected``, or spells the name of one."""
    if annotation is inspect.Signature.empty or annotation in expected:
        return True
    return isinstance(annotation, str) and _bare(annotation) in map(_bare, map(_spelling, expected))


def _spelling(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _bare(spelling: str) -> str:
    """Without the modules that names are reached through, quotes and spaces."""
    return re.sub(r"[\w.]*\.|[\s'\"]", "", spelling)
