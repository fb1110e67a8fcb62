"""One optimizer step, over all its micro-batches.

    count the items of the step on all ranks         Collectives.sum
    for each micro-batch:
        no_sync(), unless it is the last
        forward, loss * its weight, backward         Trainer.training_step
    clip                                             optim.clipping
    optimizer.step(), schedule.step(), zero_grad

A rank whose share of a micro-batch is empty takes part with a weight of zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.optim.clipping import clip_gradient
from paceline.train import losses

if TYPE_CHECKING:
    from paceline.train.trainer import Trainer


@dataclass(frozen=True)
class MicroBatch:
    """This rank's part of one micro-batch.

    Attributes:
        inputs: the batch as the collator made it; never empty.
        samples: how many of its samples count: all, or none if the rank's share is empty.
    """

    inputs: Any
    samples: int


@dataclass(frozen=True)
class StepOutcome:
    """What a step came to.

    Attributes:
        loss: scalar tensor; its mean over ranks is the mean loss over the step's items.
        grad_norm: norm before clipping, the same on every rank; None if nothing is clipped.
        learning_rate: of the first parameter group, in this step.
    """

    loss: Tensor
    grad_norm: Tensor | None
    learning_rate: float


def run_step(trainer: Trainer, micro_batches: Sequence[MicroBatch], step_samples: int) -> StepOutcome:
    """Take one optimizer step.

    Args:
        trainer: whose wrapped model, optimizer and schedule move.
        micro_batches: of this rank; equally many on every rank.
        step_samples: samples of the step over all ranks and micro-batches.
    """
    loss = accumulate(trainer, micro_batches, step_samples)
    grad_norm = _clip(trainer)
    learning_rate = float(trainer.optimizer.param_groups[0]["lr"])
    trainer.fire("on_pre_optimizer_step")
    trainer.optimizer.step()
    trainer.fire("on_optimizer_step")
    trainer.lr_scheduler.step()
    trainer.model_wrapped.zero_grad()
    return StepOutcome(loss, grad_norm, learning_rate)


def accumulate(trainer: Trainer, micro_batches: Sequence[MicroBatch], step_samples: int) -> Tensor:
    """Forward and backward of every micro-batch; gradients are averaged during the last backward.

    Returns:
        the sum of the weighted losses, a scalar tensor.
    """
    counts = [_own_items(trainer, each) for each in micro_batches]
    total = _step_items(trainer, counts, step_samples)
    takes_total = trainer.loss_takes_total
    trainer.current_gradient_accumulation_steps = len(micro_batches)
    loss = torch.zeros((), device=trainer.args.device)
    for number, (micro_batch, own) in enumerate(zip(micro_batches, counts, strict=True), start=1):
        last = number == len(micro_batches)
        countable = takes_total or int(own) > 0
        inputs = micro_batch.inputs if countable else losses.with_countable_labels(micro_batch.inputs)
        trainer.loss_weight = _weight(trainer, micro_batch, own, total, takes_total)
        with nullcontext() if last else _no_sync(trainer):
            loss += trainer.training_step(trainer.model_wrapped, inputs, total if takes_total else None).sum()
        if not last:
            trainer.fire("on_substep_end")
    return loss


def _no_sync(trainer: Trainer) -> AbstractContextManager[None]:
    """A block whose backwards leave their gradients on this rank."""
    wrapped: Any = trainer.model_wrapped
    blocked: AbstractContextManager[None] = wrapped.no_sync()
    return blocked


def _own_items(trainer: Trainer, micro_batch: MicroBatch) -> int | Tensor:
    """Items of this rank's part; a tensor where labels are counted, on every rank alike."""
    items = losses.count_items(micro_batch.inputs, micro_batch.samples, trainer.model_shifts_labels)
    return items if micro_batch.samples else items * 0


def _step_items(trainer: Trainer, counts: Sequence[int | Tensor], step_samples: int) -> int | Tensor:
    """Items of the whole step; only counted labels need a collective, samples are known from the plan."""
    if not any(isinstance(count, Tensor) for count in counts):
        return step_samples
    own = torch.tensor(sum(int(count) for count in counts), device=trainer.args.device)
    return trainer.collectives.sum(own, "counting the items of the step").clamp(min=1)


def _weight(
    trainer: Trainer, micro_batch: MicroBatch, own: int | Tensor, total: int | Tensor, takes_total: bool
) -> float | Tensor:
    """What the loss is multiplied by; the head of losses.py says why."""
    world_size = trainer.args.world_size
    if takes_total:
        return float(world_size if micro_batch.samples else 0)
    return int(own) * world_size / total


def _clip(trainer: Trainer) -> Tensor | None:
    limit = trainer.args.max_grad_norm
    return clip_gradient(trainer.model_wrapped.parameters(), limit) if limit > 0 else None
