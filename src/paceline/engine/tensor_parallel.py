"""Parameters that tensor parallelism has sharded (DTensor), under a wrapper over the mesh's other dimension.

Buckets hold plain memory, so what is trained, averaged and saved under a wrapper is each rank's own
shard, a plain parameter. The module computes with a DTensor over the shard's memory, made anew by every
forward, through which the gradient comes back to the shard.

Note "two values of one name": the shard is the registered parameter, so ``named_parameters`` and
``state_dict`` give it. The DTensor lies in the instance's ``__dict__``, where attribute access looks
first. It stays there after forward, since checkpointed blocks run once more in backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor, nn

from paceline.errors import ArgumentError

# A module, the name of its parameter, the rank's own shard, and what makes the DTensor of a shard.
_Place = tuple[nn.Module, str, nn.Parameter, Callable[[Tensor], Tensor]]


def is_part_of_a_larger(mesh: Any) -> bool:
    """Whether a device mesh is a slice of another one, so that modules may be sharded along the rest."""
    return mesh is not None and bool(mesh._get_root_mesh() != mesh)


def train_own_shards(module: nn.Module) -> None:
    """Make each DTensor parameter this rank's shard, a plain parameter over the same memory.

    Optimizers must be constructed afterwards: the parameters are others. Does what torch's own wrapper
    does with ``torch.distributed.tensor.parallel.ddp``, but the module keeps its parameters.
    """
    shards: dict[nn.Parameter, nn.Parameter] = {}
    places: list[_Place] = []
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and _is_dtensor(parameter):
                shard = shards.setdefault(parameter, _shard_of(parameter))
                places.append((owner, name, shard, _distribute_like(parameter)))
    for owner, name, shard, _ in places:
        owner._parameters[name] = shard
    if places:
        module.register_forward_pre_hook(functools.partial(_compute_with_dtensors, places))


def refuse_dtensors(module: nn.Module, ignored: Collection[str]) -> None:
    """Raise for a sharded parameter that is still there."""
    for name, parameter in module.named_parameters():
        if name not in ignored and _is_dtensor(parameter):
            raise ArgumentError(
                f"cannot average {name}, which is a DTensor. Under tensor parallelism "
                'make one mesh of both, init_device_mesh(..., mesh_dim_names=("dp", "tp")), parallelize over '
                'mesh["tp"], and write DistributedDataParallel(module, device_mesh=mesh["dp"])'
            )


def _is_dtensor(parameter: Tensor) -> bool:
    if type(parameter) is nn.Parameter:
        return False
    from torch.distributed.tensor import DTensor  # whoever has such parameters has imported it

    return isinstance(parameter, DTensor)


def _shard_of(parameter: Any) -> nn.Parameter:
    shard = nn.Parameter(parameter._local_tensor.detach(), requires_grad=parameter.requires_grad)
    if shard.requires_grad:
        shard.register_hook(_wait_for)
    return shard


def _wait_for(gradient: Any) -> Any:
    """A gradient that a collective of tensor parallelism still works on is waited for."""
    return gradient.wait() if hasattr(gradient, "wait") else gradient


def _distribute_like(parameter: Any) -> Callable[[Tensor], Tensor]:
    return functools.partial(
        type(parameter).from_local,
        device_mesh=parameter.device_mesh,
        placements=parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _compute_with_dtensors(places: Sequence[_Place], module: nn.Module, inputs: Any) -> None:
    for owner, name, shard, distribute in places:
        if owner._parameters.get(name) is shard:  # not if the user has put something else there
            owner.__dict__[name] = distribute(shard)
        else:
            owner.__dict__.pop(name, None)
