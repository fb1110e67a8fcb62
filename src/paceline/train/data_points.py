"""The Trainer's override points for data: loaders, orders, and what a batch is made of.

A mixin of Trainer, so that trainer.py stays an outline; each method is one call from data.py,
orders.py, streams.py or feeds.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from paceline.train import batches, data, rules, step, streams
from paceline.train.orders import EpochOrder, LengthGroupedOrder, lengths_of

if TYPE_CHECKING:
    from paceline.train.arguments import TrainingArguments


class DataPoints:
    """See the module's text.

    Attributes:
        _signature_columns: entries of samples that are kept; None until it is first asked for.
    """

    args: TrainingArguments
    model: nn.Module
    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    processing_class: Any
    label_names: list[str]
    _signature_columns: list[str] | None = None

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The loader of this rank's micro-batches.

        An override may return any loader: what its sampler or batch sampler gives, or the stream it
        reads, is dealt out to the ranks. Anything that is no DataLoader gives this rank's own batches.
        """
        data.check_dataset(self.train_dataset, "train_dataset")
        if data.is_stream(self.train_dataset):
            per_rank = self.args.train_batch_size
            return streams.stream_loader(self.train_dataset, self._collator(), self.args, per_rank, True)
        order = self._get_train_sampler(self.train_dataset)
        return data.train_loader(self.train_dataset, order, self._collator(), self.args)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """The loader of this rank's part of `eval_dataset` (a name, if several were given)."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        data.check_dataset(dataset, "eval_dataset")
        if data.is_stream(dataset):
            per_rank = self.args.eval_batch_size
            return streams.stream_loader(dataset, self._collator(), self.args, per_rank, False)
        batches = data.eval_batches(self._get_eval_sampler(dataset), self.args)
        return data.eval_loader(dataset, batches, self._collator(), self.args)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """The loader of this rank's part of `test_dataset`."""
        return self.get_eval_dataloader(test_dataset)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], int | Tensor | None]:
        """This rank's micro-batches of one step, and the items of that step on all ranks.

        Args:
            epoch_iterator: over the step's batches.
            num_batches: how many there are; the same on every rank.
            device: where a counted number is to be.

        Returns:
            the batches (equally many on every rank), and the items that the step's loss is a mean over;
            None where these are the samples.
        """
        batches = list(islice(epoch_iterator, num_batches))
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> int | Tensor | None:
        """Items of these batches over all ranks; None where these are the samples."""
        trainer: Any = self
        return step.count_items_of_step(trainer, batch_samples, device)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        """The order of all samples of an epoch, the same on every rank."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        if self.args.train_sampling_strategy == "group_by_length":
            names = getattr(self.processing_class, "model_input_names", None) or ["input_ids"]
            lengths = lengths_of(dataset, self.args.length_column_name, names[0])
            return LengthGroupedOrder(lengths, self.get_total_train_batch_size(self.args), seed)
        return EpochOrder(len(dataset), seed, shuffle=self.args.train_sampling_strategy == "random")

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[int]:
        """The order of evaluation samples."""
        return EpochOrder(len(eval_dataset), shuffle=False)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Samples of one step over all ranks and micro-batches."""
        return args.train_batch_size * args.world_size * args.gradient_accumulation_steps

    def num_examples(self, dataloader: Any) -> int:
        """Samples of the loader's data set, over all ranks; an estimate if it has no length."""
        dataset = getattr(dataloader, "dataset", None)
        source: Any = (
            dataset.dataset if isinstance(dataset, (streams.Stream, data.SeededDataset)) else dataset
        )
        if hasattr(source, "__len__"):
            return len(source)
        return self.get_total_train_batch_size(self.args) * max(self.args.max_steps, 0)

    def _prepare_input(self, value: Any) -> Any:
        """Tensors, also nested ones, on this rank's device."""
        non_blocking = rules.config_of(self.args).non_blocking
        return batches.to_device(value, self.args.device, non_blocking)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The batch on this rank's device."""
        return self._prepare_input(inputs)

    def _set_signature_columns_if_needed(self) -> None:
        """Find out which entries of samples the forward takes; a subclass may set others."""
        if self._signature_columns is None:
            self._signature_columns = sorted(batches.used_entries(self.model, self.label_names) or [])

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """The data set without the columns that are not used, if it can leave columns out."""
        self._set_signature_columns_if_needed()
        unused = set(getattr(dataset, "column_names", None) or []) - set(self._signature_columns or [])
        if not self.args.remove_unused_columns or not self._signature_columns or not unused:
            return dataset
        return dataset.remove_columns(sorted(unused))

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """The collator, made to leave out the entries that are not used."""
        if not self.args.remove_unused_columns:
            return data_collator
        self._set_signature_columns_if_needed()
        names = frozenset(self._signature_columns or [])
        return batches.UsedEntries(data_collator, names) if names else data_collator

    def _collator(self) -> Any:
        return self._get_collator_with_removed_columns(self.data_collator)
