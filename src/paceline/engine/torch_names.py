"""Spellings of torch's class that other libraries, scripts and torch's own tests use.

Nothing here computes: each name forwards to the part that owns the matter.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchClass

from paceline.comm.coalesced import CHUNK_BYTES, broadcast_tensors
from paceline.comm.waiting import Peers
from paceline.engine.buffers import BufferSync
from paceline.engine.comm_hooks import BUILT_IN_HOOKS, Hook
from paceline.engine.logging_data import logging_data
from paceline.engine.statistics import RunStatistics
from paceline.errors import ArgumentError

if TYPE_CHECKING:
    from paceline.engine.layout import BucketLayout
    from paceline.engine.lessons import Lessons
    from paceline.engine.reducer import Reducer


class TorchNames:
    """Mixed into DistributedDataParallel; everything it reads is set there."""

    module: nn.Module
    reducer: Reducer
    buffer_sync: BufferSync
    process_group: dist.ProcessGroup
    peers: Peers
    forward_sync_buffers: bool
    find_unused_parameters: bool
    static_graph: bool
    bucket_cap_mb_list: list[float]
    _set_hook: Callable[[object, Hook, str], None]
    _meet_ranks: Callable[[], None]
    _private_group: Callable[[], dist.ProcessGroup]
    _build_reducer: Callable[[dist.ProcessGroup], None]
    _authoritative_rank: int  # the rank whose model all took at the end of the last join
    broadcast_bucket_size: ClassVar[int] = CHUNK_BYTES
    _active_ddp_module: ClassVar[Any] = None

    # -- buffers ----------------------------------------------------------------------------

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

    def will_sync_module_buffers(self) -> bool:
        """Whether the next training forward has buffers to broadcast."""
        return self.require_forward_param_sync and bool(self.buffer_sync.named())

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, Tensor]], Any],
        comm_hook_location: Any = None,
    ) -> None:
        before = comm_hook_location is not None and comm_hook_location.name == "PRE_FORWARD"
        self.buffer_sync.set_hook(state, hook, after_forward=not before)

    def _default_broadcast_coalesced(
        self, bufs: list[Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        buffers = self.modules_buffers if bufs is None else bufs
        what = "broadcast of buffers by _default_broadcast_coalesced"
        broadcast_tensors(buffers, self.peers, lambda: what, authoritative_rank, bucket_size or CHUNK_BYTES)

    # -- buckets and hooks ------------------------------------------------------------------

    @property
    def bucket_bytes_cap(self) -> int:
        """Bytes of gradient in one all-reduce, behind the first bucket."""
        return self.reducer.options.caps.limits[-1]

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """Caps of the first buckets in bytes, as given in ``bucket_cap_mb_list``."""
        return list(self.reducer.options.caps.limits[: len(self.bucket_cap_mb_list)])

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        self._set_hook(None, BUILT_IN_HOOKS[comm_hook_type], str(comm_hook_type))

    def _register_fused_optim(
        self, optim: type, *args: Any, optim_params: Iterable[Tensor] | None = None, **kwargs: Any
    ) -> None:
        """Step ``optim`` for a bucket's parameters as soon as their average is there.

        Args:
            optim: one of the optimizer classes that torch.distributed.optim has in functional form.
            args: passed to it.
            optim_params: the parameters to step, all by default.
            kwargs: passed to it.

        Raises:
            ValueError: torch has no functional form of ``optim``.
            RuntimeError: a communication hook is registered already.
        """
        # Imported here: it loads FSDP.
        from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim

        _as_overlapped_optim(optim, optim_params, *args, **kwargs).register_ddp(self)

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("static_graph is True already", stacklevel=2)
            return
        if self.reducer.passes_finished:
            error = RuntimeError(
                "_set_static_graph() should be called before training loop starts; write "
                "DistributedDataParallel(..., static_graph=True)"
            )
            raise self.logger.note(error)
        self.static_graph = True
        self.reducer.set_static_graph()

    def _remove_autograd_hooks(self) -> None:
        self.reducer.detach()

    def _check_reducer_finalized(self) -> None:
        self.reducer.check_finished()

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Go on with other ranks; a rank outside the new group keeps the old one."""
        if dist.get_rank(new_process_group) < 0:
            return
        self.process_group = new_process_group
        self.reducer.detach()
        self._meet_ranks()
        self._build_reducer(self._private_group())

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Outputs are never cloned here, so there is nothing to switch."""

    # -- facts ------------------------------------------------------------------------------

    @property
    def logger(self) -> RunStatistics:
        """What takes note of times and errors."""
        return self.reducer.statistics

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return logging_data(self)  # type: ignore[arg-type]

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise ValueError("DDP runtime logging sample rate should be equal or greater than 1")
        self.logger.sample_rate = sample_rate

    @property
    def _distributed_rank(self) -> int:
        return dist.get_rank(self.process_group)

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        return list(self._get_data_parallel_params(self.module))

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        specs = self.reducer.layout.specs
        return [slot.parameter for slot in self.reducer.layout.slots], [spec.sparse for spec in specs]

    def _build_debug_param_to_name_mapping(self, parameters: list[nn.Parameter]) -> dict[int, str]:
        names = {slot.parameter: slot.name for slot in self.reducer.layout.slots}
        for parameter, name in names.items():
            if parameter not in set(parameters):
                raise ValueError(f"Param with name {name} found in module parameters, but not in those given")
        if len(names) != len(parameters):
            raise ValueError(
                f"Expected param to name mapping to cover the wrapper's {len(names)} parameters "
                f"({', '.join(names.values())}), but {len(parameters)} were given"
            )
        return {index: names[parameter] for index, parameter in enumerate(parameters)}

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

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self.reducer.arrival_order is not None

    # -- torch.compile ----------------------------------------------------------------------

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        return cls._active_ddp_module

    @contextlib.contextmanager
    def _seen_by_compiler(self) -> Iterator[None]:
        """While a forward runs, torch.compile finds the wrapper where it looks for torch's own.

        It then cuts the graph at bucket borders, so that gradients arrive while backward goes on.
        """
        if torch.compiler.is_compiling():
            yield
            return
        _refuse_compiled_autograd()
        homes: tuple[Any, ...] = (TorchClass, type(self))
        before = [home._active_ddp_module for home in homes]
        # All that it reads is this, and it refuses to be given less than the size of torch's first bucket.
        cap = max(self.bucket_bytes_cap, dist._DEFAULT_FIRST_BUCKET_BYTES)
        for home in homes:
            home._active_ddp_module = SimpleNamespace(bucket_bytes_cap=cap)
        try:
            yield
        finally:
            for home, previous in zip(homes, before, strict=True):
                home._active_ddp_module = previous


def _refuse_compiled_autograd() -> None:
    """It would trace the hooks that average gradients, and lose them; torch's class refuses it, too."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled_autograd is not None and compiled_autograd.compiled_autograd_enabled:
        raise ArgumentError(
            "compiled autograd cannot run the hooks by which DistributedDataParallel averages gradients; "
            "leave out torch._dynamo.config.compiled_autograd. torch.compile works, of the module and of the "
            "wrapper"
        )


class TorchReducerNames:
    """Mixed into Reducer; everything it reads is set there."""

    layout: BucketLayout
    users_of_parameters: Callable[[], list[int]]
    _lessons: Lessons

    def _rebuild_buckets(self) -> bool:
        """False: buckets are planned anew between passes without being asked."""
        return False

    def _delay_all_reduce(self) -> None:
        """With ``static_graph``, torch's first pass reduces nothing before this; here it has been reduced."""

    def _get_local_used_map(self) -> Tensor:
        device = self.layout.tail.device
        return torch.tensor(self.users_of_parameters(), dtype=torch.int32, device=device)

    def _ddp_graph_static(self) -> bool:
        return self._lessons.graph_is_static
