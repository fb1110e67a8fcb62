"""One optimizer step, over all its micro-batches.

    count the items of the step on all ranks         Trainer.get_batch_samples
    for each micro-batch:
        no_sync(), unless it is the last
        forward, loss * its weight, backward         Trainer.training_step
    clip                                             optim.clipping
    optimizer.step(), schedule.step(), zero_grad     unless the gradient is not finite

A rank whose share of a micro-batch is empty takes part with a weight of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.optim.clipping import clip_gradient, gradient_norm
from paceline.recorder.ring import recorder
from paceline.train import losses
from paceline.train.batches import batch_size_of
from paceline.train.clock import Clock
from paceline.train.feeds import MicroBatch, StepData
from paceline.train.weighing import Weighing

if TYPE_CHECKING:
    from paceline.train.trainer import Trainer


@dataclass(frozen=True)
class StepOutcome:
    """What a step came to.

    Attributes:
        loss: its mean over ranks is the mean loss over the step's items.
        grad_norm: norm of the averaged gradient before clipping, the same on every rank.
        learning_rate: of the first parameter group, in this step.
    """

    loss: float
    grad_norm: float
    learning_rate: float


def run_step(
    trainer: Trainer, step: StepData, clock: Clock, split_further: Callable[[Exception], StepData]
) -> StepOutcome:
    """Take one optimizer step.

    Args:
        trainer: whose wrapped model, optimizer and schedule move.
        step: what to work on.
        clock: told what takes how long.
        split_further: given what forward or backward raised, gives the step anew in smaller micro-batches,
            or raises it.
    """
    loss = None
    while loss is None:
        try:
            with clock.compute:
                micro_batches, items = gather_batches(trainer, step)
                loss = accumulate(trainer, micro_batches, _samples(trainer, step) if items is None else items)
        except Exception as error:
            step = split_further(error)
    with clock.optimizer:
        parameters = list(trainer.model_wrapped.parameters())  # once: that takes as long as a small step
        grad_norm = float(_clip(trainer, parameters))  # the one place where a step waits for the device
        learning_rate = float(trainer.optimizer.param_groups[0]["lr"])
        trainer.fire("on_pre_optimizer_step")
        _move(trainer, grad_norm, loss)
        trainer.fire("on_optimizer_step")
    if not trainer.accelerator.optimizer_step_was_skipped and not _goes_by_metric(trainer.lr_scheduler):
        trainer.lr_scheduler.step()
    for parameter in parameters:
        parameter.grad = None
    return StepOutcome(float(loss), grad_norm, learning_rate)


def gather_batches(trainer: Trainer, step: StepData) -> tuple[list[MicroBatch], int | Tensor | None]:
    """The micro-batches as `get_batch_samples` (which may be overridden) leaves them; the items it counts."""
    trainer.share_sizes = [each.samples for each in step.micro_batches]
    inputs = [each.inputs for each in step.micro_batches]
    batches, items = trainer.get_batch_samples(iter(inputs), len(inputs), trainer.args.device)
    if len(batches) == len(inputs):
        sizes = trainer.share_sizes
    else:
        sizes = [batch_size_of(batch) for batch in batches]
    return [MicroBatch(batch, size) for batch, size in zip(batches, sizes, strict=True)], items


def accumulate(trainer: Trainer, micro_batches: Sequence[MicroBatch], total: int | Tensor) -> Tensor:
    """Forward and backward of every micro-batch; gradients are averaged during the last backward.

    Args:
        trainer: whose wrapped model is run.
        micro_batches: of this rank; equally many on every rank.
        total: items of the step over all ranks and micro-batches.

    Returns:
        the sum of the weighted losses, a scalar tensor.
    """
    takes_total, device = trainer.loss_takes_total, trainer.args.device
    ranks = trainer.collectives.world_size if trainer.args.average_tokens_across_devices else 1
    trainer.current_gradient_accumulation_steps = len(micro_batches)
    parts = []
    for number, micro_batch in enumerate(micro_batches, start=1):
        last = number == len(micro_batches)
        recorder().micro_batch = number
        own = own_items(trainer, micro_batch)
        countable = takes_total or int(own) > 0
        inputs = micro_batch.inputs if countable else losses.with_countable_labels(micro_batch.inputs)
        trainer.weighing = Weighing(own, total, micro_batch.samples, ranks, takes_total, device)
        with trainer.accelerator.synchronizing(last, trainer.model_wrapped):
            part = trainer.training_step(trainer.model_wrapped, inputs, trainer.weighing.count)
        parts.append(part.sum() if part.dim() else part)
        if micro_batch.samples:
            trainer.current_flos += float(trainer.floating_point_ops(micro_batch.inputs))
        if not last:
            trainer.fire("on_substep_end")
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def own_items(trainer: Trainer, micro_batch: MicroBatch) -> int | Tensor:
    """Items of this rank's part; a tensor where labels are counted, on every rank alike."""
    items = losses.count_items(micro_batch.inputs, micro_batch.samples, trainer.model_shifts_labels)
    return items if micro_batch.samples else items * 0


def count_items_of_step(
    trainer: Trainer, batches: Sequence[Any], device: torch.device
) -> int | Tensor | None:
    """Items of the step that its loss is a mean over, an int64 scalar; None where samples count.

    Over all ranks, or with average_tokens_across_devices=False over this rank's.
    """
    sizes = trainer.share_sizes
    if len(sizes) != len(batches):
        sizes = [batch_size_of(batch) for batch in batches]
    counts = [own_items(trainer, MicroBatch(batch, size)) for batch, size in zip(batches, sizes, strict=True)]
    if not any(isinstance(count, Tensor) for count in counts):
        return None
    items = torch.tensor(sum(int(count) for count in counts), device=device)
    if trainer.args.average_tokens_across_devices:
        items = trainer.collectives.sum(items, "counting the items of the step")
    return items.clamp(min=1)


def _samples(trainer: Trainer, step: StepData) -> int:
    """The same where samples count."""
    if trainer.args.average_tokens_across_devices:
        return step.samples
    return max(sum(each.samples for each in step.micro_batches), 1)


def _clip(trainer: Trainer, parameters: list[nn.Parameter]) -> Tensor:
    """The gradient's norm; the loss scale is taken out of it, and it is clipped if it is to be."""
    trainer.accelerator.unscale_gradients(trainer.optimizer)
    limit = trainer.args.max_grad_norm
    return clip_gradient(parameters, limit) if limit > 0 else gradient_norm(parameters)


def _move(trainer: Trainer, grad_norm: float, loss: Tensor) -> None:
    """Let the optimizer step, unless the gradient is not finite."""
    accelerator, step = trainer.accelerator, trainer.state.global_step + 1
    bad = trainer.bad_steps.is_bad(grad_norm, loss, step, scaled=accelerator.scaler is not None)
    accelerator.step(trainer.optimizer, skip=bad)


def _goes_by_metric(schedule: Any) -> bool:
    """Whether the schedule moves after evaluations, not after steps."""
    return isinstance(schedule, ReduceLROnPlateau)
