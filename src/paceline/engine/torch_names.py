"""Spellings of torch's class that other libraries and scripts call, over our own parts.

Nothing here computes: each name forwards to the part that owns the matter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from paceline.engine.buffers import BufferSync
from paceline.engine.comm_hooks import BUILT_IN_HOOKS, Hook
from paceline.engine.reducer import Reducer


class TorchNames:
    """Mixed into DistributedDataParallel; everything it reads is set there."""

    module: nn.Module
    reducer: Reducer
    buffer_sync: BufferSync
    process_group: dist.ProcessGroup
    forward_sync_buffers: bool

    @property
    def broadcast_buffers(self) -> bool:
        """Whether buffers follow rank 0 at the start of forward."""
        return self.forward_sync_buffers

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The buffers that are kept equal on all ranks."""
        return list(self.buffer_sync.named().values())

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The same, by dotted name."""
        return self.buffer_sync.named()

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether the next training forward broadcasts buffers; True makes it do so."""
        return self.buffer_sync.is_due(self.reducer.passes_finished)

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        if value:
            self.buffer_sync.make_due()

    @property
    def bucket_bytes_cap(self) -> int:
        """Bytes of gradient in one all-reduce, behind the first bucket."""
        return self.reducer.options.caps.limits[-1]

    @property
    def _distributed_rank(self) -> int:
        return dist.get_rank(self.process_group)

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        self.register_comm_hook(None, BUILT_IN_HOOKS[comm_hook_type])

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Defined by the wrapper."""
        raise NotImplementedError

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Collection[str]
    ) -> None:
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter
