"""Low-precision copies of parameters for forward and backward, full precision outside.

Serves torch's ``_MixedPrecision`` configuration: between the start of a forward and the end of
its backward each parameter's data is a copy in ``param_dtype``; gradients are reduced in
``reduce_dtype`` and kept, like the parameters, in full precision.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from paceline.engine.bucket import GradBucket
from paceline.engine.parameters import gradient_dtype


class PrecisionConfig(Protocol):
    """The fields of torch's ``_MixedPrecision``; None leaves the dtype as it is."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None


class LowPrecision:
    """Swaps a module's parameters between full and low precision.

    Args:
        module: the wrapped module; its buffers are cast here and stay so.
        ignored: dotted names that keep their precision.
        config: dtypes.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str], config: PrecisionConfig) -> None:
        self._dtype = config.param_dtype
        self._parameters = [
            p for name, p in module.named_parameters() if name not in ignored and p.is_floating_point()
        ]
        for name, buffer in module.named_buffers():
            if name not in ignored and buffer.is_floating_point() and config.buffer_dtype is not None:
                buffer.data = buffer.to(config.buffer_dtype)
        for parameter in self._parameters:
            parameter._fp_param = parameter.data  # type: ignore[attr-defined]
            parameter._mp_param = parameter.data.new_empty(0, dtype=self._dtype)  # type: ignore[attr-defined]
        self._gradient_dtypes = [gradient_dtype(parameter) for parameter in self._parameters]
        self._held: list[Tensor | None] | None = None  # gradients from before, while lowered

    def lower(self) -> bool:
        """Replace the parameters' data by copies in low precision; False if they are lowered already."""
        if self._dtype is None or self._held is not None:
            return False
        self._held = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
            parameter.grad_dtype = None  # let autograd accumulate in low precision
            parameter._fp_param = parameter.data  # type: ignore[attr-defined]
            parameter.data = parameter._mp_param = parameter.data.to(self._dtype)  # type: ignore[attr-defined]
        return True

    def restore(self) -> None:
        """Give parameters and gradients full precision again, and free the copies."""
        held, self._held = self._held, None
        parameters = zip(self._parameters, self._gradient_dtypes, held or (), strict=held is not None)
        for parameter, dtype, before in parameters:
            low, parameter.grad = parameter.grad, None
            parameter.data = parameter._fp_param  # type: ignore[attr-defined]
            parameter._mp_param = parameter.data.new_empty(0, dtype=self._dtype)  # type: ignore[attr-defined]
            parameter.grad_dtype = dtype
            parameter.grad = _added(before, low, dtype)

    def cast_inputs(self, values: Any) -> Any:
        """Floating-point tensors in nested containers, in the parameters' low precision."""
        if self._dtype is None:
            return values
        dtype = self._dtype
        return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values)


def average_in(
    state: tuple[torch.dtype, dist.ProcessGroup], bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    """Communication hook: average the bucket in the dtype of the state, return it in its own."""
    dtype, group = state
    full = bucket.buffer()
    low = full.to(dtype).div_(dist.get_world_size(group))
    future: torch.futures.Future[list[Tensor]] = dist.all_reduce(low, group=group, async_op=True).get_future()
    return future.then(lambda done: full.copy_(done.value()[0]))


def _added(before: Tensor | None, low: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if low is None:
        return before
    return low.to(dtype) if before is None else before.add_(low)
