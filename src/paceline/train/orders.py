"""The order of an epoch's samples: a function of the seed and the epoch alone, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from paceline.errors import ArgumentError
from paceline.train.randomness import derive_seed

_MOST_BATCHES_SORTED_TOGETHER = 50


def even_part(size: int, parts: int, index: int) -> range:
    """Part `index` of range(size) cut into `parts` contiguous parts that differ by one at most."""
    base, extra = divmod(size, parts)
    start = index * base + min(index, extra)
    return range(start, start + base + (1 if index < extra else 0))


class EpochOrder(Sampler[int]):
    """The order of an epoch: a permutation that depends on (seed, epoch) alone, or 0, 1, 2, ...

    Args:
        num_samples: samples of the data set.
        seed: of the permutations.
        shuffle: False keeps the data set's own order in every epoch.
    """

    def __init__(self, num_samples: int, seed: int = 0, shuffle: bool = True) -> None:
        self.num_samples, self.seed, self.shuffle = num_samples, seed, shuffle
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next pass is for."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        return iter(self.as_tensor().tolist())

    def as_tensor(self) -> torch.Tensor:
        """The whole order, int64 of shape (num_samples,)."""
        if not self.shuffle:
            return torch.arange(self.num_samples, device="cpu")
        generator = torch.Generator().manual_seed(derive_seed("order", self.seed, self.epoch))
        return torch.randperm(self.num_samples, generator=generator, device="cpu")


class LengthGroupedOrder(EpochOrder):
    """A permutation in which samples of like length stand together, so that batches need little padding.

    Samples are shuffled, cut into stretches of many global batches, and sorted by length inside each
    stretch, longest first. The longest of all comes first, so that a batch that does not fit the
    memory shows at once.

    Args:
        lengths: of the samples, in tokens.
        batch_size: samples of one global batch.
        seed: of the permutations.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int = 0) -> None:
        super().__init__(len(lengths), seed)
        self.lengths, self.batch_size = torch.as_tensor(lengths, device="cpu"), batch_size

    def as_tensor(self) -> torch.Tensor:
        """The whole order, int64 of shape (num_samples,)."""
        shuffled = super().as_tensor()
        batches = max(1, min(self.num_samples // (self.batch_size * 4), _MOST_BATCHES_SORTED_TOGETHER))
        stretches = list(shuffled.split(batches * self.batch_size))
        longest = max(range(len(stretches)), key=lambda index: int(self.lengths[stretches[index]].max()))
        stretches.insert(0, stretches.pop(longest))
        return torch.cat(
            [stretch[self.lengths[stretch].argsort(descending=True, stable=True)] for stretch in stretches]
        )


def lengths_of(dataset: Any, column: str, input_name: str) -> Sequence[int]:
    """The lengths of a data set's samples.

    Args:
        dataset: of dict samples; a column of lengths is read from it if it has `column_names`.
        column: the column of lengths.
        input_name: the entry whose length counts where there is no such column.

    Raises:
        ArgumentError: samples have no such entry.
    """
    if column in (getattr(dataset, "column_names", None) or []):
        return list(dataset[column])
    if not isinstance(dataset[0], Mapping) or input_name not in dataset[0]:
        raise ArgumentError(
            f"train_sampling_strategy='group_by_length' needs samples with an entry {input_name!r}, whose "
            f"length counts, or a data set with a column {column!r} (length_column_name)"
        )
    return [len(dataset[index][input_name]) for index in range(len(dataset))]
