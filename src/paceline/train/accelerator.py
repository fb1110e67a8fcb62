"""What scripts and subclasses find as ``trainer.accelerator``: the part of Accelerate's class that they use.

The Trainer's own step goes through it as well where Hugging Face's does (`backward`,
`unscale_gradients`, `step`), so that an overridden training_step that calls
``self.accelerator.backward(loss)`` gets the same weights and the same loss scaling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.train import rules
from paceline.train.weighing import Weighing, weighted
from paceline.train.whereabouts import DistributedState

if TYPE_CHECKING:
    from paceline.train.accelerator_config import AcceleratorConfig
    from paceline.train.arguments import TrainingArguments

_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Accelerator:
    """One rank among all, and what mixed precision takes.

    Args:
        args: the settings.
        weighing: gives the weight of the micro-batch at work.

    Attributes:
        state: where this rank stands.
        mixed_precision: no, bf16 or fp16.
        scaler: of the loss, with fp16; else None.
        sync_gradients: whether the micro-batch at work is its step's last.
        optimizer_step_was_skipped: whether the last step was, because of its gradient.
        parallelism_config: None, as only data parallelism is served.
        even_batches: kept for those who set it; no sample is ever given twice.
    """

    parallelism_config = None

    def __init__(self, args: TrainingArguments, weighing: Callable[[], Weighing]) -> None:
        self._args, self._weighing = args, weighing
        self.state = DistributedState(args.device)
        self.mixed_precision = args.mixed_precision
        precise = self.mixed_precision != "fp16"
        self.scaler = None if precise else torch.amp.GradScaler(args.device.type)
        self.sync_gradients = True
        self.optimizer_step_was_skipped = False
        self.even_batches = self._config.even_batches

    # Where this rank stands

    @property
    def device(self) -> torch.device:
        """What this rank computes on."""
        return self._args.device

    @property
    def num_processes(self) -> int:
        """Number of ranks. A compute_loss that asks for it multiplies by it itself (see `Weighing`)."""
        self._weighing().note_ranks_were_asked_for()
        return self.state.num_processes

    @property
    def process_index(self) -> int:
        """This rank."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:
        """This rank's number on its machine."""
        return self.state.local_process_index

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.state.is_local_main_process

    @property
    def distributed_type(self) -> str:
        """NO, MULTI_CPU, MULTI_GPU ..."""
        return self.state.distributed_type

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self._args.gradient_accumulation_steps

    @property
    def dataloader_config(self) -> SimpleNamespace:
        """The entries of accelerator_config that are about data."""
        config = self._config
        return SimpleNamespace(
            split_batches=config.split_batches,
            dispatch_batches=config.dispatch_batches,
            even_batches=self.even_batches,
            use_seedable_sampler=config.use_seedable_sampler,
            non_blocking=config.non_blocking,
        )

    # Between ranks

    def wait_for_everyone(self) -> None:
        """A barrier."""
        dist.barrier()

    def print(self, *values: Any, **settings: Any) -> None:
        """Print on the first rank of each machine."""
        if self.is_local_main_process:
            print(*values, **settings)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Rank 0 runs the block before the others do."""
        return self._args.main_process_first(local=False)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """The first rank of each machine runs the block before its others do."""
        return self._args.main_process_first(local=True)

    def gather(self, value: Any) -> Any:
        """Tensors of all ranks, joined along the first dimension (scalars become vectors), on every rank.

        Args:
            value: a tensor, or tensors in dicts, lists and tuples; their first dimension may differ by rank.
        """
        return _for_each_tensor(value, self._gather_tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The same; nothing has to be cut off, because no sample is given twice."""
        if use_gather_object or not _has_tensors(input_data):
            parts: list[Any] = [None] * self.state.num_processes
            dist.all_gather_object(parts, input_data)
            return [each for part in parts for each in (part if isinstance(part, list) else [part])]
        return self.gather(input_data)

    def reduce(self, value: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Tensors added up ("sum") or averaged ("mean") over ranks, on every rank."""
        shares = self.state.num_processes if reduction == "mean" else 1

        def reduced(tensor: Tensor) -> Tensor:
            total = tensor.detach().clone()
            dist.all_reduce(total)
            return total * (scale / shares) if reduction == "mean" or scale != 1.0 else total

        return _for_each_tensor(value, reduced)

    def pad_across_processes(
        self, value: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Tensors padded along `dim` to the longest of all ranks."""

        def padded(tensor: Tensor) -> Tensor:
            if dim >= tensor.dim():
                return tensor
            longest = torch.tensor(tensor.shape[dim], device=tensor.device)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
            missing = list(tensor.shape)
            missing[dim] = int(longest) - tensor.shape[dim]
            filler = tensor.new_full(missing, pad_index)
            return torch.cat([filler, tensor] if pad_first else [tensor, filler], dim=dim)

        return _for_each_tensor(value, padded)

    # The model and its step

    def prepare(self, *objects: Any, **settings: Any) -> Any:
        """The objects as they are: the Trainer deals out loaders and wraps the model itself."""
        return objects[0] if len(objects) == 1 else objects

    def prepare_model(self, model: nn.Module, **settings: Any) -> nn.Module:
        """A further model (a reference, a reward model), on this rank's device; not wrapped."""
        return model.to(self.device)

    def unwrap_model(self, model: Any, **settings: Any) -> Any:
        """The model inside its wrapper."""
        return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model

    def autocast(self, **settings: Any) -> AbstractContextManager[Any]:
        """The block in which a forward computes in mixed precision."""
        dtype = _PRECISIONS.get(self.mixed_precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def backward(self, loss: Tensor, **settings: Any) -> None:
        """Backward of the micro-batch at work: the loss times its weight, and scaled for fp16."""
        own_part = weighted(loss, self._weighing().factor())
        if self.scaler is not None:
            own_part = self.scaler.scale(own_part)
        own_part.backward(**settings)

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        """A block whose backwards leave their gradients on this rank."""
        return model.no_sync() if hasattr(model, "no_sync") else nullcontext()

    @contextmanager
    def synchronizing(self, last: bool, model: Any) -> Iterator[None]:
        """The block of one micro-batch; gradients are averaged in the last one, or in all if so set."""
        self.sync_gradients = last or self._config.sync_each_batch
        with nullcontext() if self.sync_gradients else self.no_sync(model):
            yield

    def unscale_gradients(self, optimizer: Any) -> None:
        """Undo the loss scale in the gradients; once a step, before they are clipped."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the (unscaled) gradients; returns their norm before."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def step(self, optimizer: Any, skip: bool) -> None:
        """Let the optimizer step, unless the gradient is bad; the loss scale follows."""
        self.optimizer_step_was_skipped = skip
        if self.scaler is not None:
            self.scaler.step(optimizer)  # leaves the step out by itself
            self.scaler.update()
        elif not skip:
            optimizer.step()

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's state by name."""
        state: dict[str, Any] = (self.unwrap_model(model) if unwrap else model).state_dict()
        return state

    def free_memory(self, *objects: Any) -> Any:
        """Give unused device memory back; the objects are the caller's to let go of."""
        if self.device.type != "cpu":
            torch.accelerator.memory.empty_cache()
        return objects

    @property
    def _config(self) -> AcceleratorConfig:
        return rules.config_of(self._args)

    def _gather_tensor(self, tensor: Tensor) -> Tensor:
        own = tensor.detach()
        own = own.reshape(1) if own.dim() == 0 else own.contiguous()
        lengths = [torch.tensor(0, device=own.device) for _ in range(self.state.num_processes)]
        dist.all_gather(lengths, torch.tensor(len(own), device=own.device))
        longest = max(int(length) for length in lengths)
        filled = torch.cat([own, own.new_zeros(longest - len(own), *own.shape[1:])])
        parts = [torch.empty_like(filled) for _ in lengths]
        dist.all_gather(parts, filled)
        return torch.cat([part[: int(length)] for part, length in zip(parts, lengths, strict=True)])


def _for_each_tensor(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return type(value)({name: _for_each_tensor(each, function) for name, each in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(_for_each_tensor(each, function) for each in value)
    return value


def _has_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any(_has_tensors(each) for each in value)
    return isinstance(value, Tensor)
