"""What must hold before a wrapper is built, and the errors that say so."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.comm.coalesced import gather_objects
from paceline.comm.waiting import Peers
from paceline.engine.callbacks import owners_of_hooks
from paceline.errors import ArgumentError, ReplicaMismatchError


def warn_of_old_names(check_reduction: bool, broadcast: bool | None, forward_sync: bool | None) -> None:
    """Warn, as torch does, of arguments that have a newer name or no effect any more."""
    if check_reduction:
        warnings.warn("check_reduction has no effect any more; leave it out", FutureWarning, stacklevel=3)
    if broadcast is not None and forward_sync is not None:
        warnings.warn(
            "broadcast_buffers is the old name of forward_sync_buffers; both are given, so it is ignored",
            FutureWarning,
            stacklevel=3,
        )
    elif broadcast is not None:
        warnings.warn(
            "broadcast_buffers is the old name of forward_sync_buffers. Both decide about forward alone: "
            "buffers are made equal at construction in any case",
            FutureWarning,
            stacklevel=3,
        )


def check_delayed(delayed: Any, trigger: Any) -> None:
    """Raise unless delayed parameters and their trigger are given together."""
    if (delayed is None) != (trigger is None):
        raise ArgumentError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
        )


def choose_group(group: dist.ProcessGroup | None, mesh: Any) -> dist.ProcessGroup:
    """The group to average over: the one given, that of a one-dimensional mesh, or all ranks."""
    if group is not None and mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if mesh is not None:
        if mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {mesh}.")
        mesh_group: dist.ProcessGroup = mesh.get_group(mesh_dim=0)
        return mesh_group
    if group is not None:
        return group
    if not dist.is_initialized():
        raise ArgumentError(
            "DistributedDataParallel needs a process group and there is none; call "
            "torch.distributed.init_process_group() first, and start the script with `paceline launch`"
        )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def require_default_group(group: dist.ProcessGroup) -> None:
    """Raise for a group that cannot be found again after pickling."""
    if group is not dist.group.WORLD:
        raise RuntimeError(
            "DistributedDataParallel can only be pickled or copied with the default process group; "
            "pickle or copy its .module and wrap that"
        )


def only_device_type(module: nn.Module) -> torch.device:
    """The module's device (the first of several of one type).

    Raises:
        ArgumentError: devices of several types, or tensors that have none yet (``meta``).
        RuntimeError: parameters that have no shape yet.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device.type == "meta":
            raise ArgumentError(
                f"cannot train {name}, which is on the meta device and has no values. "
                "Give the module memory with module.to_empty(device=...), load or initialise it, then wrap it"
            )
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    types = {device.type for device in devices}
    if len(types) > 1:
        raise ArgumentError(
            "DistributedDataParallel's input module must be on the same type of devices, but it has "
            f"parameters or buffers on {sorted(types)}; move it to one with module.to(...)"
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise RuntimeError(
                f"Modules with uninitialized parameters can't be used with `DistributedDataParallel`: {name} "
                "has no shape yet. Run a dummy forward pass to correctly initialize the modules"
            )
    return min(devices, key=str) if devices else torch.device("cpu")


def refuse_parameters_of_other_groups(
    module: nn.Module, ignored: Collection[str], group: dist.ProcessGroup
) -> None:
    """Raise if a wrapper over other ranks than ``group`` averages a parameter of ``module`` already."""
    ranks = dist.get_process_group_ranks(group)
    for name, parameter in module.named_parameters():
        if name in ignored or not parameter.requires_grad:
            continue
        for other in owners_of_hooks([parameter]):
            theirs = dist.get_process_group_ranks(other.group)
            if theirs != ranks:
                raise ArgumentError(
                    f"rank {dist.get_rank()}: {name} is averaged over ranks {theirs} by a wrapper of its own "
                    f"and would be averaged over ranks {ranks} here. To leave it to that wrapper, name its "
                    "parameters and buffers before you wrap: "
                    f"module._ddp_params_and_buffers_to_ignore = [{name!r}, ...]; to average it here, delete "
                    "that wrapper first"
                )


def check_devices(
    module: nn.Module,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[list[int] | None, int | None]:
    """``device_ids`` and ``output_device`` as indices, None for modules on CPU or on several devices."""
    ids = list(device_ids or ())
    if len(ids) > 1:
        raise ArgumentError("device_ids can only be None or contain a single element.")
    devices = {parameter.device for parameter in module.parameters()}
    on_one_accelerator = len(devices) == 1 and next(iter(devices)).type != "cpu"
    if not on_one_accelerator:
        if ids or output_device is not None:
            raise ArgumentError(
                "DistributedDataParallel device_ids and output_device arguments only work with single-device "
                f"modules on an accelerator, but got device_ids {device_ids}, output_device {output_device}, "
                f"and module parameters on {sorted(map(str, devices))}; leave them out"
            )
        return None, None
    if not ids:
        return None, None
    index = _device_index(ids[0])
    return [index], index if output_device is None else _device_index(output_device)


def _device_index(device: int | torch.device | str) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return 0 if index is None else index


def check_caps(cap_mb: float | None, cap_mb_list: list[float]) -> None:
    """Raise for bucket sizes that are none; 0 stands for one parameter per bucket."""
    for value in [*cap_mb_list, *([] if cap_mb is None else [cap_mb])]:
        if not 0 <= value < math.inf:
            raise ArgumentError(
                f"bucket_cap_mb must be a number of MiB, or 0 for one parameter per bucket, got {value!r}"
            )


def check_interval(steps: int) -> int:
    """The number of steps, if it can be one."""
    if steps < 0:
        raise ArgumentError(f"verify_replicas_every must be 0 (never) or a number of steps, got {steps!r}")
    return steps


def verify_same_parameters(module: nn.Module, ignored: Collection[str], peers: Peers, when: str) -> None:
    """Raise on every rank, naming the first difference, unless all ranks hold the same parameters.

    Args:
        module: the wrapped module.
        ignored: dotted names that may differ.
        peers: the ranks that hold a replica.
        when: says in the error of an exchange that fails at which point it was.
    """
    mine = [
        (name, tuple(p.shape), str(p.dtype), p.requires_grad)
        for name, p in module.named_parameters()
        if name not in ignored
    ]
    everyone = gather_objects(mine, peers, lambda: f"{when}, comparison of parameters' names and shapes")
    for rank, theirs in enumerate(everyone):
        if theirs != mine:
            (other,) = peers.in_job([rank])
            raise ReplicaMismatchError(_first_difference(peers.global_rank, mine, other, theirs))


def _first_difference(my_rank: int, mine: list[Any], rank: int, theirs: list[Any]) -> str:
    for index in range(max(len(mine), len(theirs))):
        here = mine[index] if index < len(mine) else None
        there = theirs[index] if index < len(theirs) else None
        if here != there:
            return (
                f"rank {my_rank}: the ranks hold different models. The first difference is parameter "
                f"{index}: {_describe(here)} on rank {my_rank}, {_describe(there)} on rank {rank} "
                f"({len(mine)} and {len(theirs)} parameters in all). Build the same module on every rank."
            )
    raise AssertionError("called only when the lists differ")


def _describe(parameter: tuple[str, tuple[int, ...], str, bool] | None) -> str:
    if parameter is None:
        return "nothing"
    name, shape, dtype, trained = parameter
    sizes = ", ".join(str(extent) for extent in shape)
    return f"{name} of shape [{sizes}], {dtype}{'' if trained else ', frozen'}"
