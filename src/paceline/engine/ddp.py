"""DistributedDataParallel: construct, forward, no_sync, join, state_dict, pickling.

Forward does three things around the module's own: it lets the reducer catch up with what
happened to the module, broadcasts buffers when due, and marks the outputs so that the
reducer sees where backward starts. Gradients are the reducer's business.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel.distributed import DistributedDataParallel as TorchClass

from paceline.comm.coalesced import broadcast_tensors
from paceline.comm.interpreted import interpreted
from paceline.comm.private_group import private_group
from paceline.comm.waiting import Peers
from paceline.engine.buffers import BufferSync
from paceline.engine.checks import (
    check_caps,
    check_delayed,
    check_devices,
    check_interval,
    choose_group,
    only_device_type,
    refuse_parameters_of_other_groups,
    require_default_group,
    verify_same_parameters,
    warn_of_old_names,
)
from paceline.engine.comm_hooks import CommHook, Hook, check_hook, name_of_hook
from paceline.engine.join import WrapperJoinHook, agree_to_synchronise, synchronise_buffers
from paceline.engine.optimizer_in_backward import step_and_clear, take_over
from paceline.engine.options import ReducerOptions, follow_rank_0
from paceline.engine.outputs import tensors_in, to_device
from paceline.engine.parameters import TrainedParameters
from paceline.engine.plan import BucketCaps
from paceline.engine.precision import LowPrecision, PrecisionConfig, average_in
from paceline.engine.reducer import Reducer
from paceline.engine.state_keys import uncompiled, use_plain_keys, without_compiler_prefix
from paceline.engine.tensor_parallel import is_part_of_a_larger, refuse_dtensors, train_own_shards
from paceline.engine.torch_names import TorchNames
from paceline.engine.verify import compare_replicas

# What a pickled wrapper leaves behind: the ranks, and what is built for them.
_NOT_COPIED = ("process_group", "device_mesh", "peers", "reducer", "_trained", "buffer_sync", "low_precision")


@TorchClass.register  # so isinstance() is true of it: Accelerate and torch's own libraries ask
class DistributedDataParallel(TorchNames, nn.Module, Joinable):
    """Trains copies of one module on several ranks, averaging their gradients in backward.

    Takes the place of ``torch.nn.parallel.DistributedDataParallel`` (Li et al., "PyTorch
    Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020), with the same
    arguments and methods. Differences, all of them on the safe side:

    - Whether a backward synchronises depends on ``no_sync`` when that backward starts, not on
      how or whether forward was called; several forwards and backwards, and losses computed
      through ``wrapper.module``, give averaged gradients.
    - Unused parameters never block. A parameter that no rank used keeps its ``.grad`` (None
      included); one that some ranks used gets the mean with zeros for the others. With
      ``find_unused_parameters=False`` the next forward raises and names them, on all ranks.
    - Gradients always live in the buckets, once. With ``gradient_as_bucket_view=False`` (the
      default) a gradient that you keep across ``zero_grad`` stays as it is, as in plain PyTorch;
      with True later passes write over it, which saves looking.
    - Parameters may be frozen, unfrozen or replaced after wrapping, on all ranks alike; so may ``module``.
    - ``state_dict()`` has the keys of ``module``, ``load_state_dict()`` takes those and torch's alike.
    - A module without trainable parameters is passed through.

    All ranks must construct it at the same point. Construction compares names, shapes and dtypes
    of parameters on all ranks, then makes parameters and buffers equal to rank 0's.

    Args:
        module: the module to train; its parameters all on one type of device.
        device_ids: one device index that inputs are moved to, for modules on one accelerator.
        output_device: accepted for modules on an accelerator; outputs stay where they are.
        dim: kept as an attribute only: a rank has one device, so no batch is scattered along it.
        broadcast_buffers: whether buffers follow rank 0 at the start of forward.
        init_sync: whether construction compares and broadcasts; if False, you make ranks equal.
        process_group: the ranks; all of them by default.
        bucket_cap_mb: MiB of gradient in one all-reduce; default 25, with small first and last buckets;
            0 for one parameter in each.
        find_unused_parameters: allow steps that leave parameters without gradient.
        check_reduction: obsolete in torch as well; only False.
        gradient_as_bucket_view: see above.
        static_graph: every step uses the same parameters equally often; a change raises.
        delay_all_reduce_named_params: (name, parameter) pairs that travel behind all others.
        param_to_hook_all_reduce: given together with it; the delayed parameters are reduced when
            backward ends, which is never before this parameter's gradient is there.
        mixed_precision: an object with param_dtype, reduce_dtype and buffer_dtype, as torch's
            ``_MixedPrecision``: forward and backward run on low-precision copies of the parameters.
        device_mesh: a one-dimensional mesh in place of ``process_group``. If it is part of a larger one,
            parameters sharded along the rest become each rank's shard; construct optimizers afterwards.
        skip_all_reduce_unused_params: with ``find_unused_parameters``, leave buckets out that no rank
            needs in a pass; the others' usage is then exchanged in a collective of its own.
        bucket_cap_mb_list: caps of the first buckets in MiB; ``bucket_cap_mb`` holds for the others.
        batched_grad_copy: small gradients are always copied in batches here; either value is right.
        forward_sync_buffers: newer name of ``broadcast_buffers``; wins if given.
        verify_replicas_every: compare the parameters of all ranks bit for bit before every so many-th
            forward that follows a synchronising backward; 0 for never.

    Raises:
        ArgumentError: arguments that cannot work.
        ReplicaMismatchError: ranks hold different parameters; raised on every rank.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        verify_replicas_every: int = 0,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        warn_of_old_names(check_reduction, broadcast_buffers, forward_sync_buffers)
        check_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
        self.device_mesh = device_mesh
        self.process_group = choose_group(process_group, device_mesh)
        self.module = module
        self.dim = dim
        self._prepare_module(device_ids, output_device)
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self._verified_at = 0  # the pass after which the ranks' parameters were compared last
        self.verify_replicas_every = check_interval(verify_replicas_every)
        self.delayed_parameters = frozenset(
            without_compiler_prefix(name) for name, _ in delay_all_reduce_named_params or ()
        )
        self.bucket_cap_mb = bucket_cap_mb
        self.bucket_cap_mb_list = list(bucket_cap_mb_list or ())
        check_caps(bucket_cap_mb, self.bucket_cap_mb_list)
        wanted = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.forward_sync_buffers = True if wanted is None else wanted
        use_plain_keys(self)
        self.peers = Peers(self.process_group)
        if init_sync:
            follow_rank_0(self, self.peers)
        self._follow_buffers()
        if init_sync:
            self._make_replicas_equal()
        self.mixed_precision = mixed_precision
        self._build_reducer(self._private_group())

    def __setattr__(self, name: str, value: Any) -> None:
        """As of any module; but another ``module`` is wrapped in place of the one before, on all ranks."""
        if name == "module" and "reducer" in self.__dict__ and isinstance(value, nn.Module):
            self._wrap_instead(value)
        else:
            super().__setattr__(name, value)

    # -- training ---------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's part of the batch.

        Communicates only when gradients are enabled and the module is in training mode, and then
        only buffers, at the first forward after a synchronising backward.

        Raises:
            UnusedParametersError: the last step left parameters without gradient, and
                ``find_unused_parameters`` is False.
        """
        # A forward on tensors lent by functional_call is the bare module's; see TrainedParameters.lent.
        trains = torch.is_grad_enabled() and not self._trained.lent()
        hook_after = trains and self._before_forward()
        if self.device_ids:
            device = torch.device(self.device.type, self.device_ids[0])
            inputs, kwargs = to_device(inputs, device), to_device(kwargs, device)
        try:
            output = self._run_module(inputs, kwargs)
        except Exception as error:
            self.reducer.tell_exception(error)
            raise
        if hook_after:
            self.buffer_sync.run_hook()
        if trains:
            self.reducer.prepare_for_backward(tensors_in(output), self.training)
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards that start inside do not communicate; gradients add up on this rank.

        The next backward outside averages everything that has added up.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward that starts now averages gradients; ``no_sync`` writes it."""
        return self.reducer.synchronise

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.reducer.synchronise = value

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Let ``hook(state, bucket)`` reduce buckets in place of averaging.

        Args:
            state: passed to every call.
            hook: ``(state, bucket) -> torch.futures.Future[Tensor]``; the bucket has the methods of
                ``torch.distributed.GradBucket``, its gradients are local and not divided.

        Raises:
            TypeError, ValueError: not callable, or annotated as something else.
            RuntimeError: a hook is registered already.
        """
        try:
            check_hook(hook)
        except (TypeError, ValueError) as error:
            raise self.reducer.statistics.note(error) from None
        self._set_hook(state, hook, name_of_hook(hook))

    def _set_hook(self, state: object, hook: Hook, name: str) -> None:
        registered = self.reducer.hook
        if registered is not None:
            raise RuntimeError(
                f"a communication hook can be registered only once on a wrapper; {registered.name} is already"
            )
        self.reducer.hook = CommHook(hook, state, name)

    # -- uneven inputs ----------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Context in which ranks may have different numbers of batches.

        Args:
            divide_by_initial_world_size: divide gradient sums by the number of all ranks; if False,
                by the number of ranks that still have data.
            enable: False makes the context do nothing.
            throw_on_early_termination: raise on all ranks as soon as one has run out.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What ``Join`` runs on a rank that has run out of data."""
        return WrapperJoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """Device of the collectives that ``Join`` issues."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """Group of the collectives that ``Join`` issues."""
        return self.process_group

    def verify_replicas(self) -> None:
        """Compare parameters and buffers of all ranks bit for bit; every rank must call it.

        Between a training forward and its backward, buffers such as running statistics differ by design.

        Raises:
            ReplicaMismatchError: on every rank, naming the first tensor that differs, where and by how much.
        """
        compare_replicas(uncompiled(self.module), self.peers, self.parameters_to_ignore, include_buffers=True)

    # -- state ------------------------------------------------------------------------------

    def replicated_parameters(self) -> list[nn.Parameter]:
        """The parameters that are equal on all ranks, frozen ones among them."""
        named = uncompiled(self.module).named_parameters()
        return [parameter for name, parameter in named if name not in self.parameters_to_ignore]

    def __getstate__(self) -> dict[str, Any]:
        """Without the process group and the reducer; the copy is built on the default group."""
        require_default_group(self.process_group)
        state = self.__dict__.copy()
        for name in _NOT_COPIED:
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group, self.device_mesh = choose_group(None, None), None
        self._meet_ranks()
        self._build_reducer(self.process_group)  # a copy may be made on one rank alone

    # -- inside -----------------------------------------------------------------------------

    @interpreted
    def _before_forward(self) -> bool:
        """What precedes a forward with gradients; True if the user's buffer hook is to run after it."""
        Join.notify_join_context(self)
        joining = self.buffer_sync.joining = self._join_config.enable
        if not self._optimizers_taken_over:
            self._take_over_optimizers()
        newcomers = self.reducer.prepare_for_forward(self.training)
        if newcomers:
            when = f"forward before backward pass {self.reducer.passes_finished + 1}"
            self._verify_same_parameters(when)
            broadcast_tensors(newcomers, self.peers, lambda: f"{when}, broadcast of new parameters")
        self._verify_if_due()
        if joining:
            synchronise_buffers(self, has_data=True)
            agree_to_synchronise(self, has_data=True)
            return False
        return self.training and self.buffer_sync.before_forward(self.reducer.passes_finished)

    def _verify_if_due(self) -> None:
        every, passes = self.verify_replicas_every, self.reducer.passes_finished
        if every and passes and passes % every == 0 and passes != self._verified_at:
            self._verified_at = passes
            when = f"forward before backward pass {passes + 1}, "
            compare_replicas(uncompiled(self.module), self.peers, self.parameters_to_ignore, False, when)

    def _run_module(self, inputs: Any, kwargs: Any) -> Any:
        if self.low_precision is None:
            with self._seen_by_compiler():
                return self.module(*inputs, **kwargs)
        lowered, cast = self.low_precision.lower(), self.low_precision.cast_inputs
        try:
            return self.module(*cast(inputs), **cast(kwargs))
        finally:
            if lowered and not torch.is_grad_enabled():
                self.low_precision.restore()  # no backward follows

    def _take_over_optimizers(self) -> None:
        """Once, at the first forward: step optimizers that were to run in backward after averaging."""
        self._optimizers_taken_over = True
        owned = take_over(slot.parameter for slot in self.reducer.layout.slots)
        self.reducer.at_pass_end.append(functools.partial(step_and_clear, owned))

    def _meet_ranks(self) -> None:
        self.peers = Peers(self.process_group)
        self._follow_buffers()

    def _follow_buffers(self) -> None:
        module, ignored = uncompiled(self.module), self.parameters_to_ignore
        self.buffer_sync = BufferSync(module, self.peers, ignored, self.device, self.forward_sync_buffers)

    def _prepare_module(self, device_ids: Any = None, output_device: Any = None) -> None:
        """Read what ``module`` says of itself, and raise if it cannot be wrapped."""
        module = uncompiled(self.module)
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        self.parameters_to_ignore = set(map(without_compiler_prefix, ignored))
        self.device = only_device_type(module)
        self.device_ids, self.output_device = check_devices(module, device_ids, output_device)
        if is_part_of_a_larger(self.device_mesh):
            train_own_shards(module)
        refuse_dtensors(module, self.parameters_to_ignore)
        refuse_parameters_of_other_groups(module, self.parameters_to_ignore, self.process_group)

    def _wrap_instead(self, module: nn.Module) -> None:
        """Go on with another module, hooks and ``no_sync`` as they are; with the one before if it raises."""
        compiled_or_not = uncompiled(module) is uncompiled(self.module)
        before = self.__dict__ | {"_modules": dict(self._modules)}
        super().__setattr__("module", module)
        if compiled_or_not:
            return  # the same parameters under the same names: what was learned of them holds
        older, older_buffers = self.reducer, self.buffer_sync
        try:
            self._prepare_module(self.device_ids, self.output_device)
            self._follow_buffers()
            self._make_replicas_equal()
        except BaseException:
            self.__dict__.update(before)
            raise
        self._verified_at = 0
        older.detach()
        self._build_reducer(older.group)
        self.buffer_sync.take_hook_of(older_buffers)
        self.reducer.synchronise = older.synchronise
        if self.mixed_precision is None:
            self.reducer.hook = older.hook

    def _make_replicas_equal(self) -> None:
        self._verify_same_parameters("construction of the wrapper")
        what = "construction of the wrapper, broadcast of parameters"
        broadcast_tensors(self.replicated_parameters(), self.peers, lambda: what)
        self.buffer_sync.broadcast(source=0)

    def _verify_same_parameters(self, when: str) -> None:
        verify_same_parameters(uncompiled(self.module), self.parameters_to_ignore, self.peers, when)

    def _private_group(self) -> dist.ProcessGroup:
        return private_group(self.process_group, self.device, "gradients", owner=self)

    def _build_reducer(self, group: dist.ProcessGroup) -> None:
        self._trained = TrainedParameters(uncompiled(self.module), self.parameters_to_ignore)
        self.reducer = Reducer(
            self._trained,
            group,
            ReducerOptions(
                caps=BucketCaps.from_megabytes(self.bucket_cap_mb, self.bucket_cap_mb_list),
                find_unused_parameters=self.find_unused_parameters,
                static_graph=self.static_graph,
                keep_shared=not self.gradient_as_bucket_view and self.mixed_precision is None,
                eager=self.mixed_precision is None,
                skip_unused=self.skip_all_reduce_unused_params and self.find_unused_parameters,
                delayed=self.delayed_parameters,
            ),
        )
        self.reducer.buffers = self.buffer_sync
        self.reducer.at_pass_end.append(self.buffer_sync.wait_for_hook)
        self._optimizers_taken_over = False
        self.low_precision: LowPrecision | None = None
        if self.mixed_precision is not None:
            self._use_low_precision(self.mixed_precision)

    def _use_low_precision(self, config: PrecisionConfig) -> None:
        self.low_precision = LowPrecision(uncompiled(self.module), self.parameters_to_ignore, config)
        self.reducer.at_backward_end.append(self.low_precision.restore)
        dtype = config.reduce_dtype or config.param_dtype
        if dtype is not None:
            self._set_hook((dtype, self.reducer.group), average_in, average_in.__qualname__)
