"""Evaluation: each sample once, in order, with the numbers one rank would get.

    each rank: its contiguous part of the data, batch by batch
    all ranks: sum of losses and number of items -> mean loss
    rank 0:    predictions of all parts, in order -> compute_metrics -> every rank

The ranks' parts differ by one sample at most, or are empty; nothing waits in between,
because the model runs unwrapped and without gradients.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.train.data import EvalBatches
from paceline.train.losses import count_items, with_countable_labels
from paceline.train.turns import Turns

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from paceline.train.trainer import Trainer

PADDING = -100


class EvalPrediction(NamedTuple):
    """What compute_metrics gets: arrays over the whole data set, or tuples of arrays."""

    predictions: Any
    label_ids: Any


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


@dataclass
class Part:
    """What this rank has seen so far.

    Attributes:
        loss_sum, items: for the mean loss; items is 0 if the model gives no loss.
        samples: how many.
        waiting: (predictions, labels) of batches that are on the device still.
        arrays: the same of earlier batches, as NumPy arrays.
    """

    loss_sum: float = 0.0
    items: int = 0
    samples: int = 0
    waiting: list[tuple[Any, Any]] = field(default_factory=list)
    arrays: list[tuple[Any, Any]] = field(default_factory=list)

    def move_to_cpu(self) -> None:
        """Turn what is on the device into arrays."""
        self.arrays += [(to_arrays(predictions), to_arrays(labels)) for predictions, labels in self.waiting]
        self.waiting.clear()


def evaluate(
    trainer: Trainer,
    loader: DataLoader[Any],
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
    trainer.model.eval()
    part = _run_part(trainer, loader, loss_only, ignore_keys)
    loss, samples = _sum_over_ranks(trainer, part)
    predictions, labels = (None, None) if loss_only else _join_parts(part, everywhere)
    metrics = {} if loss is None else {f"{prefix}_loss": loss}
    metrics |= _user_metrics(trainer, predictions, labels, prefix, loss_only)
    seconds = time.perf_counter() - started
    metrics[f"{prefix}_runtime"] = round(seconds, 4)
    metrics[f"{prefix}_samples_per_second"] = round(samples / seconds, 3)
    return EvalLoopOutput(predictions, labels, metrics, samples)


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
        if labels is not None or not isinstance(inputs, Mapping):
            extra = _num_items(trainer, inputs)
            loss, outputs = trainer.compute_loss(model, inputs, return_outputs=True, **extra)
            loss = loss.detach().mean()
        else:
            outputs = model(**inputs)
    if loss_only:
        return loss, None, None
    return loss, _predictions(outputs, ignore_keys, loss is not None), labels


def to_arrays(value: Any) -> Any:
    """Nested tensors as NumPy arrays; bfloat16 becomes float32."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype is torch.bfloat16 else value).numpy()
    if isinstance(value, Mapping):
        return {name: to_arrays(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(to_arrays(each) for each in value)
    return value


def join(values: list[Any]) -> Any:
    """Concatenate nested arrays of consecutive batches; sequences of other lengths are padded with -100."""
    first = values[0]
    if isinstance(first, Mapping):
        return {name: join([value[name] for value in values]) for name in first}
    if isinstance(first, tuple):
        return tuple(join(list(each)) for each in zip(*values, strict=True))
    if not isinstance(first, np.ndarray):
        return first
    rows = [np.atleast_1d(value) for value in values]
    longest = [max(sizes) for sizes in zip(*(row.shape[1:] for row in rows), strict=True)]
    return np.concatenate([_padded(row, longest) for row in rows])


def _run_part(
    trainer: Trainer, loader: DataLoader[Any], loss_only: bool, ignore_keys: list[str] | None
) -> Part:
    part, every = Part(), trainer.args.eval_accumulation_steps
    trainer.callback_handler.eval_dataloader = loader
    batches = loader.batch_sampler
    assert isinstance(batches, EvalBatches)
    for number, (indices, inputs) in enumerate(zip(batches, loader, strict=True), start=1):
        items = int(count_items(inputs, len(indices), trainer.model_shifts_labels))
        usable = inputs if items else with_countable_labels(inputs)
        loss, predictions, labels = trainer.prediction_step(trainer.model, usable, loss_only, ignore_keys)
        if loss is not None and items:
            part.loss_sum += float(loss) * items
            part.items += items
        part.samples += len(indices)
        if predictions is not None and trainer.preprocess_logits_for_metrics is not None:
            predictions = trainer.preprocess_logits_for_metrics(predictions, labels)
        if not loss_only:
            part.waiting.append((predictions, labels if items else _labels(trainer, inputs)))
        if every and number % every == 0:
            part.move_to_cpu()
        trainer.fire("on_prediction_step")
    part.move_to_cpu()
    return part


def _sum_over_ranks(trainer: Trainer, part: Part) -> tuple[float | None, int]:
    """Mean loss over all items (None without any) and number of samples."""
    device = trainer.args.device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    sums = torch.tensor([part.loss_sum, part.items, part.samples], dtype=dtype, device=device)
    trainer.collectives.sum(sums, "adding up the evaluation loss")
    loss_sum, items, samples = sums.tolist()
    return (loss_sum / items if items else None), int(samples)


def _join_parts(part: Part, everywhere: bool) -> tuple[Any, Any]:
    """Predictions and labels of the whole data set in its order, on rank 0 or on all ranks."""
    parts: list[Any] = [None] * dist.get_world_size()
    if everywhere:
        dist.all_gather_object(parts, part.arrays)
    else:
        dist.gather_object(part.arrays, parts if dist.get_rank() == 0 else None)
    batches = [batch for arrays in parts if arrays is not None for batch in arrays]
    if not batches:
        return None, None
    predictions, labels = zip(*batches, strict=True)
    return join(list(predictions)), join(list(labels))


def _user_metrics(
    trainer: Trainer, predictions: Any, labels: Any, prefix: str, loss_only: bool
) -> dict[str, float]:
    """compute_metrics of rank 0, given to all."""
    if trainer.compute_metrics is None or loss_only:
        return {}
    compute = trainer.compute_metrics

    def on_rank_zero() -> dict[str, float]:
        if predictions is None or labels is None:
            return {}
        return {name: _plain(value) for name, value in compute(EvalPrediction(predictions, labels)).items()}

    metrics = Turns().on_rank_zero(on_rank_zero, "compute_metrics")
    start = f"{prefix}_"
    return {name if name.startswith(start) else start + name: value for name, value in metrics.items()}


def _labels(trainer: Trainer, inputs: Any) -> Any:
    """The labels among the inputs: one tensor, a tuple of several, or None if any is missing."""
    if not isinstance(inputs, Mapping):
        return None
    found = tuple(inputs.get(name) for name in trainer.label_names)
    if not found or any(each is None for each in found):
        return None
    return found[0] if len(found) == 1 else found


def _num_items(trainer: Trainer, inputs: Any) -> dict[str, int | Tensor]:
    """The batch's own count for models that divide by it: an evaluation batch's loss is its mean."""
    if not trainer.loss_takes_total:
        return {}
    samples = next((len(each) for each in inputs.values() if isinstance(each, Tensor) and each.dim()), 1)
    return {"num_items_in_batch": count_items(inputs, samples, trainer.model_shifts_labels)}


def _predictions(outputs: Any, ignore_keys: list[str], with_loss: bool) -> Any:
    if isinstance(outputs, Mapping):
        kept = tuple(value for name, value in outputs.items() if name not in [*ignore_keys, "loss"])
    elif isinstance(outputs, (tuple, list)):
        kept = tuple(outputs[1:] if with_loss else outputs)
    else:
        return outputs
    return kept[0] if len(kept) == 1 else kept


def _padded(array: np.ndarray[Any, Any], sizes: list[int]) -> np.ndarray[Any, Any]:
    widths = [(0, 0)] + [(0, size - own) for size, own in zip(sizes, array.shape[1:], strict=True)]
    return np.pad(array, widths, constant_values=PADDING) if any(width[1] for width in widths) else array


def _plain(value: Any) -> Any:
    """A NumPy or torch scalar as a Python number."""
    return value.item() if isinstance(value, (np.generic, Tensor)) else value
