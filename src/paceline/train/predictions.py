"""What an evaluation keeps of its batches: nested arrays, joined, and brought to where they are wanted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

PADDING = -100


class Batch(NamedTuple):
    """Of one evaluation batch (or of many, joined): each nested tensors or arrays, or None if it is not kept.

    `losses` holds the batch's mean loss once for each sample.
    """

    predictions: Any
    labels: Any
    inputs: Any
    losses: Any


class EvalPrediction:
    """What compute_metrics gets: arrays over the whole data set, or tuples of arrays.

    It can be unpacked: ``predictions, labels = eval_prediction``, followed by inputs and losses if
    include_for_metrics asks for them.

    Attributes:
        predictions, label_ids: what the model gave, and what it should have.
        inputs: the model's main input, if asked for; else None.
        losses: for each sample the mean loss of its batch, if asked for; else None.
    """

    def __init__(self, predictions: Any, label_ids: Any, inputs: Any = None, losses: Any = None) -> None:
        self.predictions, self.label_ids = predictions, label_ids
        self.inputs, self.losses = inputs, losses
        more = [each for each in (inputs, losses) if each is not None]
        self.elements = (predictions, label_ids, *more)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def __getitem__(self, index: int) -> Any:
        return self.elements[index]

    def __len__(self) -> int:
        return len(self.elements)


def batch_to_arrays(batch: Batch) -> Batch:
    """The batch on the CPU, as NumPy arrays."""
    return Batch(*(to_arrays(each) for each in batch))


def gather_batches(own: list[Batch], everywhere: bool, interleaved: bool) -> list[Batch]:
    """The batches of all ranks in the order of the data set, on rank 0 or on all ranks; else nothing.

    Args:
        own: this rank's batches, as arrays.
        everywhere: give them to all ranks.
        interleaved: each rank has a part of every batch, not a part of the data set.
    """
    parts: list[Any] = [None] * dist.get_world_size()
    if everywhere:
        dist.all_gather_object(parts, own)
    else:
        dist.gather_object(own, parts if dist.get_rank() == 0 else None)
    given = [part for part in parts if part is not None]
    if not interleaved:
        return [batch for part in given for batch in part]
    longest = max(map(len, given), default=0)
    return [part[number] for number in range(longest) for part in given if number < len(part)]


def joined(batches: list[Batch], concatenate: bool = True) -> Batch:
    """One batch of consecutive ones; without `concatenate`, a list of theirs in each place."""
    if not batches:
        return Batch(None, None, None, None)
    columns = [list(column) for column in zip(*batches, strict=True)]
    return Batch(*(_joined_column(column, concatenate) for column in columns))


def to_tensors(value: Any) -> Any:
    """Nested arrays as tensors on the CPU."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, Mapping):
        return {name: to_tensors(each) for name, each in value.items()}
    return tuple(to_tensors(each) for each in value) if isinstance(value, tuple) else value


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


def _joined_column(column: list[Any], concatenate: bool) -> Any:
    if all(each is None for each in column):
        return None
    return join(column) if concatenate else column


def _padded(array: np.ndarray[Any, Any], sizes: list[int]) -> np.ndarray[Any, Any]:
    widths = [(0, 0)] + [(0, size - own) for size, own in zip(sizes, array.shape[1:], strict=True)]
    return np.pad(array, widths, constant_values=PADDING) if any(width[1] for width in widths) else array
