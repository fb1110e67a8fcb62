"""Evaluation: each sample once, in order, with the numbers one rank would get.

    each rank: its contiguous part of the data, batch by batch
    all ranks: sum of losses and number of items -> mean loss
    rank 0:    predictions of all parts, in order -> compute_metrics -> every rank

The ranks' parts differ by one sample at most, or are empty; nothing waits in between,
because the model runs unwrapped and without gradients. Of a stream, each rank has a part of every
batch. With batch_eval_metrics the ranks go through their batches in step, and rank 0 gives
compute_metrics all ranks' batches of one round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.train.batches import batch_size_of
from paceline.train.data import EvalBatches
from paceline.train.losses import count_items, with_countable_labels
from paceline.train.precision import half_precision_weights
from paceline.train.predictions import (
    Batch,
    EvalPrediction,
    batch_to_arrays,
    gather_batches,
    joined,
    to_tensors,
)
from paceline.train.streams import Loaded, Stream
from paceline.train.turns import Turns
from paceline.train.weighing import Weighing

if TYPE_CHECKING:
    from paceline.train.trainer import Trainer


class PredictionOutput(NamedTuple):
    """What `Trainer.predict` returns, on every rank: arrays over the whole data set, and metrics."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]


class EvalLoopOutput(NamedTuple):
    """What `Trainer.evaluation_loop` returns; predictions may be on rank 0 alone."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]
    num_samples: int


@dataclass(frozen=True)
class Wishes:
    """What an evaluation is to do beyond the loss.

    Attributes:
        loss_only: keep no predictions.
        ignore_keys: entries of the outputs to leave out.
        everywhere: give the predictions to all ranks, not only to rank 0.
        round_by_round: call compute_metrics on each round of batches.
    """

    loss_only: bool
    ignore_keys: list[str] | None
    everywhere: bool
    round_by_round: bool


@dataclass
class Part:
    """What this rank has seen so far.

    Attributes:
        loss_sum, items: for the mean loss; items is 0 if the model gives no loss.
        samples: how many.
        waiting: of batches that are on the device still.
        arrays: the same of earlier batches, as NumPy arrays.
        metrics: what compute_metrics said last, where it is called round by round.
    """

    loss_sum: float = 0.0
    items: int = 0
    samples: int = 0
    waiting: list[Batch] = field(default_factory=list)
    arrays: list[Batch] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    def move_to_cpu(self) -> None:
        """Turn what is on the device into arrays."""
        self.arrays += [batch_to_arrays(batch) for batch in self.waiting]
        self.waiting.clear()


def evaluate(
    trainer: Trainer,
    loader: Any,
    loss_only: bool,
    ignore_keys: list[str] | None,
    prefix: str,
    everywhere: bool,
) -> EvalLoopOutput:
    """Run the model over the ranks' parts and join what comes out.

    Args:
        trainer: whose model, not wrapped, is evaluated.
        loader: of this rank's part.
        loss_only: keep no predictions.
        ignore_keys: entries of the outputs to leave out.
        prefix: of the metrics' names, as in "eval".
        everywhere: give the predictions to all ranks, not only to rank 0.

    Returns:
        metrics and num_samples on every rank; predictions on rank 0, or everywhere.
    """
    started = time.perf_counter()
    rounds = trainer.args.batch_eval_metrics and trainer.compute_metrics is not None and not loss_only
    wishes = Wishes(loss_only, ignore_keys, everywhere, rounds)
    _switch_to_evaluation(trainer)
    with half_precision_weights(trainer.model, _full_eval_dtype(trainer)):
        part = _run_part(trainer, loader, wishes)
    loss, samples = _sum_over_ranks(trainer, part)
    kept = _kept(trainer, loader, part, wishes)
    metrics = {} if loss is None else {f"{prefix}_loss": loss}
    found = part.metrics if rounds else _user_metrics(trainer, kept, loss_only)
    metrics |= {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": found[name] for name in found}
    metrics |= _speed(trainer, prefix, time.perf_counter() - started, samples)
    return EvalLoopOutput(kept.predictions, kept.labels, metrics, samples)


def predict_batch(
    trainer: Trainer, model: Any, inputs: Any, loss_only: bool, ignore_keys: list[str] | None
) -> tuple[Tensor | None, Any, Any]:
    """Loss, predictions and labels of one batch; each may be None.

    The predictions are all outputs but the loss and `ignore_keys`: the tensor itself if
    it is one, else a tuple.
    """
    if ignore_keys is None:
        config = getattr(model, "config", None)
        ignore_keys = list(getattr(config, "keys_to_ignore_at_inference", ["past_key_values"]))
    labels = _labels(trainer, inputs)
    inputs = trainer._prepare_inputs(inputs)
    loss = None
    with torch.no_grad(), trainer.compute_loss_context_manager():
        if labels is not None or trainer.can_return_loss or not isinstance(inputs, Mapping):
            loss, outputs = _loss_and_outputs(trainer, model, inputs)
        else:
            outputs = model(**inputs)
    if loss_only:
        return loss, None, None
    return loss, _predictions(outputs, ignore_keys, loss is not None), labels


def _switch_to_evaluation(trainer: Trainer) -> None:
    trainer.model.eval()
    if hasattr(trainer.optimizer, "eval"):  # an optimizer without schedule has modes of its own
        trainer.optimizer.eval()


def _full_eval_dtype(trainer: Trainer) -> torch.dtype | None:
    """The precision that weights are evaluated in outside training, if it is another one."""
    if trainer.is_in_train:
        return None
    if trainer.args.bf16_full_eval:
        return torch.bfloat16
    return torch.float16 if trainer.args.fp16_full_eval else None


def _run_part(trainer: Trainer, loader: Any, wishes: Wishes) -> Part:
    part, every = Part(), trainer.args.eval_accumulation_steps
    trainer.callback_handler.eval_dataloader = loader
    batches = _sized_batches(loader)
    upcoming = next(batches, None)
    number = 0
    while upcoming is not None or wishes.round_by_round:
        if upcoming is not None:
            number += 1
            _run_batch(trainer, part, wishes, *upcoming)
            if every and number % every == 0:
                part.move_to_cpu()
            trainer.fire("on_prediction_step")
        upcoming = next(batches, None)
        if wishes.round_by_round and not _meet(trainer, part, wishes, more=upcoming is not None):
            break
    part.move_to_cpu()
    return part


def _sized_batches(loader: Any) -> Iterator[tuple[Any, int]]:
    """Each batch of the loader, and how many samples it has."""
    batches = getattr(loader, "batch_sampler", None)
    if isinstance(batches, EvalBatches):
        yield from ((inputs, len(indices)) for indices, inputs in zip(batches.own, loader, strict=True))
        return
    for loaded in loader:
        yield loaded if isinstance(loaded, Loaded) else (loaded, batch_size_of(loaded))


def _run_batch(trainer: Trainer, part: Part, wishes: Wishes, inputs: Any, samples: int) -> None:
    items = int(count_items(inputs, samples, trainer.model_shifts_labels))
    usable = inputs if items else with_countable_labels(inputs)
    main_input = _main_input(trainer, inputs)
    loss, predictions, labels = trainer.prediction_step(
        trainer.model, usable, wishes.loss_only, wishes.ignore_keys
    )
    if loss is not None and items:
        part.loss_sum += float(loss) * items
        part.items += items
    part.samples += samples
    if wishes.loss_only:
        return
    if predictions is not None and trainer.preprocess_logits_for_metrics is not None:
        predictions = trainer.preprocess_logits_for_metrics(predictions, labels)
    wants_loss = loss is not None and "loss" in trainer.args.include_for_metrics
    losses = np.full(samples, float(loss)) if wants_loss else None  # type: ignore[arg-type]
    part.waiting.append(Batch(predictions, labels if items else _labels(trainer, inputs), main_input, losses))


def _main_input(trainer: Trainer, inputs: Any) -> Any:
    """The model's main input, if compute_metrics is to have it."""
    if "inputs" not in trainer.args.include_for_metrics or not isinstance(inputs, Mapping):
        return None
    return inputs.get(getattr(trainer.model, "main_input_name", "input_ids"))


def _meet(trainer: Trainer, part: Part, wishes: Wishes, more: bool) -> bool:
    """Give compute_metrics the latest batch of every rank; returns whether any rank has more."""
    flag = torch.tensor(int(more), dtype=torch.int32, device=trainer.args.device)
    any_more = bool(trainer.collectives.max(flag, "evaluating batch by batch"))
    latest = [batch_to_arrays(batch) for batch in part.waiting[-1:]] or part.arrays[-1:]
    of_all = gather_batches(latest, everywhere=False, interleaved=False)
    together = Batch(*(to_tensors(each) for each in joined(of_all)))
    part.metrics = _call_on_rank_zero(trainer, together, compute_result=not any_more)
    if not wishes.everywhere:
        part.waiting.clear()
        part.arrays.clear()
    return any_more


def _kept(trainer: Trainer, loader: Any, part: Part, wishes: Wishes) -> Batch:
    """Predictions and all of the whole data set in its order, where they are wanted."""
    if wishes.loss_only or (wishes.round_by_round and not wishes.everywhere):
        return Batch(None, None, None, None)
    stream = getattr(loader, "dataset", None)
    interleaved = isinstance(stream, Stream) and stream.dealing.world_size > 1
    batches = gather_batches(part.arrays, wishes.everywhere, interleaved)
    return joined(batches, trainer.args.eval_do_concat_batches)


def _sum_over_ranks(trainer: Trainer, part: Part) -> tuple[float | None, int]:
    """Mean loss over all items (None without any) and number of samples."""
    device = trainer.args.device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    sums = torch.tensor([part.loss_sum, part.items, part.samples], dtype=dtype, device=device)
    trainer.collectives.sum(sums, "adding up the evaluation loss")
    loss_sum, items, samples = sums.tolist()
    return (loss_sum / items if items else None), int(samples)


def _user_metrics(trainer: Trainer, kept: Batch, loss_only: bool) -> dict[str, float]:
    """compute_metrics of rank 0, given to all."""
    if trainer.compute_metrics is None or loss_only:
        return {}
    return _call_on_rank_zero(trainer, kept)


def _call_on_rank_zero(trainer: Trainer, batch: Batch, **extra: Any) -> dict[str, float]:
    compute = trainer.compute_metrics
    assert compute is not None

    def on_rank_zero() -> dict[str, float]:
        if batch.predictions is None or batch.labels is None:
            return {}
        found = compute(EvalPrediction(*batch), **extra) or {}
        return {name: _plain(value) for name, value in found.items()}

    return Turns().on_rank_zero(on_rank_zero, "compute_metrics")


def _speed(trainer: Trainer, prefix: str, seconds: float, samples: int) -> dict[str, float]:
    rounds = math.ceil(samples / (trainer.args.eval_batch_size * trainer.args.world_size))
    return {
        f"{prefix}_runtime": round(seconds, 4),
        f"{prefix}_samples_per_second": round(samples / seconds, 3),
        f"{prefix}_steps_per_second": round(rounds / seconds, 3),
    }


def _loss_and_outputs(trainer: Trainer, model: Any, inputs: Any) -> tuple[Tensor, Any]:
    """The mean loss of a batch that is a whole step by itself, and the model's outputs."""
    items = count_items(inputs, batch_size_of(inputs), trainer.model_shifts_labels)
    takes_total, device = trainer.loss_takes_total, trainer.args.device
    trainer.weighing = Weighing(items, items, 1, trainer.args.world_size, takes_total, device)
    extra = {} if trainer.weighing.count is None else {"num_items_in_batch": trainer.weighing.count}
    loss, outputs = trainer.compute_loss(model, inputs, return_outputs=True, **extra)
    if trainer.weighing.times_ranks:
        loss = loss / trainer.args.world_size
    return loss.detach().mean(), outputs


def _labels(trainer: Trainer, inputs: Any) -> Any:
    """The labels among the inputs: one tensor, a tuple of several, or None if any is missing."""
    if not isinstance(inputs, Mapping):
        return None
    found = tuple(inputs.get(name) for name in trainer.label_names)
    if not found or any(each is None for each in found):
        return None
    return found[0] if len(found) == 1 else found


def _predictions(outputs: Any, ignore_keys: list[str], with_loss: bool) -> Any:
    if isinstance(outputs, Mapping):
        kept = tuple(value for name, value in outputs.items() if name not in [*ignore_keys, "loss"])
    elif isinstance(outputs, (tuple, list)):
        kept = tuple(outputs[1:] if with_loss else outputs)
    else:
        return outputs
    return kept[0] if len(kept) == 1 else kept


def _plain(value: Any) -> Any:
    """A NumPy or torch scalar as a Python number."""
    return value.item() if isinstance(value, (np.generic, Tensor)) else value
