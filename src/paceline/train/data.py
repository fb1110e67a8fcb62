"""Which rank sees which samples when, as a function of the seed and the step alone.

    epoch's order (seed, epoch)  ->  global batches  ->  micro-batches  ->  one share per rank

Step s of an epoch takes the next `per_rank * world_size * accumulation` samples of the
epoch's order, whatever the layout, so 1, 2 and 4 ranks with the same global batch work
through the same global batches. The last one holds what is left: no sample is seen
twice and none is left out. Then ranks may get unequal shares, even empty ones; an empty
share is fetched as one sample that counts for nothing, because its rank must still take
part in the collectives of the backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product, zip_longest
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from paceline.errors import ArgumentError
from paceline.train.arguments import TrainingArguments
from paceline.train.dispatching import loader_of, ranks_read_for
from paceline.train.orders import even_part
from paceline.train.randomness import derive_seed, isolated, seed_again


@dataclass(frozen=True)
class EpochPlan:
    """How one epoch's samples are dealt out. Pure arithmetic over positions in the order.

    Attributes:
        num_samples: samples of the epoch.
        per_rank: samples of one micro-batch on one rank.
        world_size: ranks.
        accumulation: micro-batches of a full step.
        drop_last: leave out the last global batch if it is not full.
    """

    num_samples: int
    per_rank: int
    world_size: int
    accumulation: int
    drop_last: bool = False

    @cached_property
    def micro_size(self) -> int:
        """Samples of one full micro-batch over all ranks."""
        return self.per_rank * self.world_size

    @cached_property
    def global_size(self) -> int:
        """Samples of one full step."""
        return self.micro_size * self.accumulation

    @cached_property
    def steps(self) -> int:
        """Optimizer steps of the epoch."""
        full, rest = divmod(self.num_samples, self.global_size)
        return full + (1 if rest and not self.drop_last else 0)

    def step_size(self, step: int) -> int:
        """Samples of step `step`, over all ranks and micro-batches."""
        return min(self.global_size, self.num_samples - step * self.global_size)

    def micro_batches(self, step: int) -> int:
        """Micro-batches of step `step`; the same on every rank."""
        return math.ceil(self.step_size(step) / self.micro_size)

    def share(self, step: int, micro: int, rank: int) -> range:
        """Positions that `rank` works on in one micro-batch; may be empty."""
        size = min(self.micro_size, self.step_size(step) - micro * self.micro_size)
        offset = step * self.global_size + micro * self.micro_size
        own = even_part(size, self.world_size, rank)
        return range(offset + own.start, offset + own.stop)


class Share(list[int]):
    """The indices of one rank's part of a micro-batch.

    Attributes:
        seed: of what is random in loading it.
        counts: False if it stands in for an empty part.
    """

    seed = 0
    counts = True


class StepBatches(Sampler[list[int]]):
    """Batch sampler of one rank: its shares, micro-batch by micro-batch, step by step.

    Args:
        order: gives an epoch's sample indices, the same on every rank.
        plan: how they are dealt out.
        rank: this one.
        seed: of random augmentation, which differs by epoch, step, micro-batch and rank.
        read_for: the ranks whose shares to give, in turn; default: this one alone.
    """

    def __init__(
        self, order: Sampler[int], plan: EpochPlan, rank: int, seed: int, read_for: range | None = None
    ) -> None:
        self.order, self.plan, self.rank, self.seed = order, plan, rank, seed
        self.read_for = range(rank, rank + 1) if read_for is None else read_for
        self.epoch = self.first_step = 0

    @property
    def steps(self) -> int:
        """Optimizer steps of an epoch."""
        return self.plan.steps

    @property
    def global_size(self) -> int:
        """Samples of one full step."""
        return self.plan.global_size

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self.plan.num_samples

    def step_size(self, step: int) -> int:
        """Samples of step `step`, over all ranks and micro-batches."""
        return self.plan.step_size(step)

    def share_sizes(self, step: int) -> list[int]:
        """Samples of this rank in each micro-batch of step `step`; may be 0."""
        return [
            len(self.plan.share(step, micro, self.rank)) for micro in range(self.plan.micro_batches(step))
        ]

    def start_at(self, epoch: int, step: int = 0) -> None:
        """Let the next pass be over `epoch`, from its step `step` on. Takes no time for earlier steps."""
        self.epoch, self.first_step = epoch, step
        if hasattr(self.order, "set_epoch"):
            self.order.set_epoch(epoch)

    def __len__(self) -> int:
        full = max(self.plan.steps - 1, 0) * self.plan.accumulation
        last = self.plan.micro_batches(self.plan.steps - 1) if self.plan.steps else 0
        return (full + last) * len(self.read_for)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._epoch_order()
        for step in range(self.first_step, self.plan.steps):
            for micro, rank in product(range(self.plan.micro_batches(step)), self.read_for):
                positions = self.plan.share(step, micro, rank)
                share = Share(order[position] for position in positions)
                if not share:
                    share.append(order[0])
                    share.counts = False
                share.seed = derive_seed("load", self.seed, self.epoch, step, micro, rank)
                yield share

    def _epoch_order(self) -> Sequence[int]:
        """The epoch's indices; a user's sampler may draw from the global generators, so seed them equally."""
        with isolated(derive_seed("order", self.seed, self.epoch)):
            return list(self.order)


class WholeBatches(Sampler[list[int]]):
    """Batch sampler of one rank that deals out the batches of a user's batch sampler, each as it is.

    Step s takes the next `world_size * accumulation` batches, micro-batch by micro-batch, one for
    each rank. Of the last step some may be missing: then the epoch's first batch stands in, and
    counts for nothing.

    Args:
        batches: gives an epoch's batches of indices, the same on every rank.
        world_size: ranks.
        accumulation: micro-batches of a full step.
        rank: this one.
        seed: for what the user's sampler draws, and of random augmentation.
        read_for: the ranks whose batches to give, in turn.
    """

    def __init__(
        self, batches: Any, world_size: int, accumulation: int, rank: int, seed: int, read_for: range
    ) -> None:
        self.batches, self.world_size, self.accumulation = batches, world_size, accumulation
        self.rank, self.seed, self.read_for = rank, seed, read_for
        self.start_at(0)

    def start_at(self, epoch: int, step: int = 0) -> None:
        """Let the next pass be over `epoch`, from its step `step` on."""
        self.epoch, self.first_step = epoch, step
        if hasattr(self.batches, "set_epoch"):
            self.batches.set_epoch(epoch)
        with isolated(derive_seed("order", self.seed, epoch)):
            self._dealt = [list(batch) for batch in self.batches]

    @property
    def steps(self) -> int:
        """Optimizer steps of the epoch."""
        return math.ceil(len(self._dealt) / (self.world_size * self.accumulation))

    @property
    def num_samples(self) -> int:
        """Samples of the epoch."""
        return sum(map(len, self._dealt))

    @property
    def global_size(self) -> int:
        """Batches of one full step (their sizes may differ)."""
        return self.world_size * self.accumulation

    def step_size(self, step: int) -> int:
        """Samples of step `step`, over all ranks and micro-batches."""
        return sum(map(len, self._of_step(step)))

    def share_sizes(self, step: int) -> list[int]:
        """Samples of this rank in each micro-batch of step `step`; may be 0."""
        return [len(self._batch_of(step, micro, self.rank)) for micro in range(self._micro_batches(step))]

    def __len__(self) -> int:
        return sum(self._micro_batches(step) for step in range(self.steps)) * len(self.read_for)

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.first_step, self.steps):
            for micro, rank in product(range(self._micro_batches(step)), self.read_for):
                batch = self._batch_of(step, micro, rank)
                share = Share(batch or self._dealt[0])
                share.counts = bool(batch)
                share.seed = derive_seed("load", self.seed, self.epoch, step, micro, rank)
                yield share

    def _of_step(self, step: int) -> list[list[int]]:
        return self._dealt[step * self.global_size : (step + 1) * self.global_size]

    def _micro_batches(self, step: int) -> int:
        return math.ceil(len(self._of_step(step)) / self.world_size)

    def _batch_of(self, step: int, micro: int, rank: int) -> list[int]:
        """The batch of `rank` in one micro-batch; empty where the last round has none for it."""
        place = step * self.global_size + micro * self.world_size + rank
        return self._dealt[place] if place < len(self._dealt) else []


class EvalBatches(list[list[int]]):
    """Batch sampler of one rank's part of an evaluation set: the same batches in every pass.

    Args:
        part_of: gives the batches of a rank.
        args: say which rank this is, and for which ranks it reads, in turn.

    Attributes:
        own: the batches of this rank; may be none.
    """

    def __init__(self, part_of: Callable[[int], list[list[int]]], args: TrainingArguments) -> None:
        self.own = part_of(args.process_index)
        rounds = zip_longest(*map(part_of, ranks_read_for(args)))
        super().__init__(batch for each in rounds for batch in each if batch is not None)


class SeededDataset(Dataset[Any]):
    """A data set whose random augmentation is a function of the share that is loaded, in any worker."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, share: list[int]) -> list[Any]:
        """The samples of one share; called by the DataLoader, in the rank itself or in a worker."""
        seed_again(share.seed if isinstance(share, Share) else 0)
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(list(share)))
        return [self.dataset[index] for index in share]


class Samples(list[Any]):
    """The samples of a share, and whether they count."""

    counts = True


class CountedBatches(SeededDataset):
    """The same where batches come in whatever order they are ready in, and must say what they are."""

    def __getitems__(self, share: list[int]) -> list[Any]:
        """The samples of one share, for `Counted`."""
        samples = Samples(super().__getitems__(share))
        samples.counts = not isinstance(share, Share) or share.counts
        return samples


class Counted:
    """A collator that also says how many of the samples count."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, samples: Samples) -> tuple[Any, int]:
        return self.collate(list(samples)), len(samples) if samples.counts else 0


def train_loader(
    dataset: Any,
    order: Any,
    collate: Any,
    args: TrainingArguments,
    per_rank: int | None = None,
    **loading: Any,
) -> DataLoader[Any]:
    """The loader of this rank's training micro-batches.

    Args:
        dataset: gives samples by index.
        order: gives an epoch's indices, the same on every rank.
        collate: makes a batch of samples.
        args: the settings.
        per_rank: samples of one rank's micro-batch, instead of what `args` say.
        loading: for the DataLoader, instead of what `args` say.

    Raises:
        ArgumentError: the data set holds no full global batch although drop_last is set, or nothing.
    """
    plan = EpochPlan(
        num_samples=len(order),
        per_rank=per_rank or args.train_batch_size,
        world_size=args.world_size,
        accumulation=args.gradient_accumulation_steps,
        drop_last=args.dataloader_drop_last,
    )
    if plan.steps == 0:
        raise ArgumentError(
            f"there is nothing to train on: {plan.num_samples} samples, a global batch of {plan.global_size}"
            + (", and dataloader_drop_last=True" if plan.drop_last else "")
        )
    batches = StepBatches(order, plan, args.process_index, args.seed, ranks_read_for(args))
    settings = loading_settings(args, True, loading)
    if settings["num_workers"] and not settings.get("in_order", True):
        counted: Any = Counted(collate)
        return loader_of(args, CountedBatches(dataset), batch_sampler=batches, collate_fn=counted, **settings)
    return loader_of(args, SeededDataset(dataset), batch_sampler=batches, collate_fn=collate, **settings)


def eval_loader(
    dataset: Any, batches: EvalBatches, collate: Any, args: TrainingArguments, **loading: Any
) -> DataLoader[Any]:
    """The loader of this rank's part of an evaluation set.

    Args:
        dataset: gives samples by index.
        batches: the batches of indices.
        collate: makes a batch of samples.
        args: the settings.
        loading: for the DataLoader, instead of what `args` say.
    """
    settings = loading_settings(args, False, loading)
    return loader_of(args, dataset, batch_sampler=batches, collate_fn=collate, **settings)


def eval_batches(order: Any, args: TrainingArguments, per_rank: int | None = None) -> EvalBatches:
    """An evaluation order as batches of `per_rank` samples; each rank has a contiguous part."""
    indices, size = list(order), per_rank or args.eval_batch_size
    return EvalBatches(lambda rank: _eval_part(indices, size, args.world_size, rank), args)


def _eval_part(order: list[int], size: int, world_size: int, rank: int) -> list[list[int]]:
    """The contiguous part of `rank`, cut into batches of `size`.

    All ranks have equally many, if they can: a compute_loss or a callback of the user's may hold a
    collective for each batch, as TRL's does. So where rank 0's one sample more makes one batch more, the
    others cut one off their last batch.
    """
    positions = even_part(len(order), world_size, rank)
    indices = order[positions.start : positions.stop]
    batches = [indices[start : start + size] for start in range(0, len(indices), size)]
    most = math.ceil(len(even_part(len(order), world_size, 0)) / size)
    if batches and len(batches) < most and len(batches[-1]) > 1:
        batches[-1:] = [batches[-1][:-1], batches[-1][-1:]]
    return batches


def is_stream(dataset: Any) -> bool:
    """Whether samples come one after another, not by index."""
    by_index = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return isinstance(dataset, IterableDataset) or (not by_index and hasattr(dataset, "__iter__"))


def check_dataset(dataset: Any, what: str) -> None:
    """Refuse what no samples can be had from.

    Raises:
        ArgumentError: `dataset` is missing, or can be neither indexed nor iterated.
    """
    if dataset is None:
        raise ArgumentError(f"the Trainer was made without {what}; pass {what}=... to it")
    if not is_stream(dataset) and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ArgumentError(
            f"{what} is a {type(dataset).__name__}; it needs __len__ and __getitem__, or __iter__"
        )


def loading_settings(args: TrainingArguments, training: bool, given: dict[str, Any]) -> dict[str, Any]:
    """What the arguments say about worker processes, in DataLoader's words.

    Args:
        args: the settings.
        training: whether it is for training. An evaluation's predictions stand in the order of the data set,
            and its loader is used once.
        given: instead of what `args` say.
    """
    settings = {
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory and args.device.type != "cpu",
        "persistent_workers": args.dataloader_persistent_workers,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "multiprocessing_context": args.dataloader_multiprocessing_context,
        "in_order": args.dataloader_in_order,
        **given,
    }
    return settings if training else {**settings, "persistent_workers": False, "in_order": True}
