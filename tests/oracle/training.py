"""Trains a specimen: under a wrapper on every rank, or in one process on the joined batch."""

from __future__ import annotations

import copy
import hashlib
import importlib
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from tests.oracle.zoo import BY_NAME, EDIT_STEP, STEPS, Batch, LossOf, NoSync, Specimen

TORCH = "torch.nn.parallel:DistributedDataParallel"
GRADIENT_STEPS = (0, 1, EDIT_STEP, STEPS - 1)
GROUP_TIMEOUT = 10.0  # seconds


@dataclass
class Training:
    """What one process saw in `STEPS` steps.

    Attributes:
        losses: of each step.
        gradients: by step (those of GRADIENT_STEPS) and parameter name, dense; None where there is none.
        parameters: after each step, by name.
        hashes: of all parameters' bytes after each step.
        final_hash: of parameters and buffers after one more forward, which is due to align the buffers.
        error: the traceback of what ended the training early.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[int, dict[str, Tensor | None]] = field(default_factory=dict)
    parameters: list[dict[str, Tensor]] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    final_hash: str = ""
    error: str = ""


def train_on_ranks(rank: int, world_size: int, names: list[str], ddp: str) -> dict[tuple[str, str], Training]:
    """Every named specimen under the wrapper `ddp`, and under torch's where that is right.

    Returns:
        By specimen and "ours" or "torch". Parameters are kept on rank 0 only; the others have their hashes.
    """
    seen = {}
    for name in names:
        specimen = BY_NAME[name]
        seen[name, "ours"] = _train_in_group(rank, world_size, specimen, ddp)
        if not specimen.torch_wrong and ddp != TORCH:
            seen[name, "torch"] = _train_in_group(rank, world_size, specimen, TORCH)
    return seen


def train_in_one_process(specimen: Specimen, world_size: int) -> Training:
    """The specimen without any wrapper, on the batches of all ranks joined."""
    model = _model(specimen)
    result = Training()

    def step_loss(step: int) -> LossOf:
        if not specimen.couples:
            return lambda micro: specimen.loss(model, _joined(specimen, world_size, step, micro))
        own = [{n: b.clone() for n, b in model.named_buffers()} for _ in range(world_size)]
        for name, buffer in own[0].items():
            _set_buffer(model, name, buffer)  # what rank 0 makes of its buffers goes on
        nets = [partial(_call, model, buffers) for buffers in own]
        return lambda micro: torch.stack(
            [specimen.loss(net, specimen.batch(r, step, micro)) for r, net in enumerate(nets)]
        ).mean()

    _train(result, specimen, model, step_loss, nullcontext, keep=True)
    return result


def _train_in_group(rank: int, world_size: int, specimen: Specimen, ddp: str) -> Training:
    """In a process group of its own, so that a specimen that fails leaves the next ones alone.

    The groups stay until the rank ends: a Gloo group that is destroyed joins its threads while holding the
    interpreter's lock, and now and then one of them waits for just that to let go of a finished work.
    """
    result = Training()
    group = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT))
    try:
        model = _model(specimen)
        if rank:  # the wrapper has to give every rank rank 0's
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(rank)
        wrapped = _class(ddp)(model, process_group=group, **specimen.wrapper)
        net = wrapped.module if specimen.bypass else wrapped

        def step_loss(step: int) -> LossOf:
            return lambda micro: specimen.loss(net, specimen.batch(rank, step, micro))

        _train(result, specimen, wrapped.module, step_loss, wrapped.no_sync, keep=rank == 0)
        specimen.loss(wrapped, specimen.batch(0, STEPS, 0))
        result.final_hash = _hash(dict(model.named_parameters()) | dict(model.named_buffers()))
    except Exception:
        result.error = traceback.format_exc()
    return result


def _train(
    result: Training,
    specimen: Specimen,
    model: nn.Module,
    step_loss: Callable[[int], LossOf],
    no_sync: NoSync,
    keep: bool,
) -> None:
    optimizer = _optimizer(specimen, model)
    for step in range(STEPS):
        if step == EDIT_STEP and specimen.edit is not None:
            specimen.edit(model)
            optimizer = _optimizer(specimen, model)
        loss = specimen.program(step_loss(step), no_sync, specimen.micro_batches)
        result.losses.append(loss.item())
        if step in GRADIENT_STEPS:
            result.gradients[step] = {name: _gradient(p) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        result.hashes.append(_hash(parameters))
        if keep:
            result.parameters.append(parameters)


def _model(specimen: Specimen) -> nn.Module:
    torch.manual_seed(7)
    model = specimen.build()
    return model if specimen.dtype is None else model.to(specimen.dtype)


def _optimizer(specimen: Specimen, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=specimen.momentum)


def _joined(specimen: Specimen, world_size: int, step: int, micro: int) -> Batch:
    batches = [specimen.batch(rank, step, micro) for rank in range(world_size)]
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def _call(model: nn.Module, buffers: dict[str, Tensor], *inputs: Tensor) -> Tensor:
    return functional_call(model, buffers, inputs)


def _set_buffer(model: nn.Module, name: str, buffer: Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, buffer)


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    if parameter.grad is None:
        return None
    gradient = parameter.grad.detach()
    return gradient.to_dense() if gradient.is_sparse else copy.deepcopy(gradient)


def _hash(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _class(spec: str) -> Callable[..., nn.Module]:
    module, _, attribute = spec.partition(":")
    return getattr(importlib.import_module(module), attribute)
