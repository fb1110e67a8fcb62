"""Where the micro-batches of a step come from, and how the ranks agree on them.

    PlannedFeed    a data set with indices: everything about an epoch is known beforehand
    StreamFeed     anything else: before each step the ranks tell each other what they have

`feed_of` makes one of any loader, also one that an overridden get_train_dataloader returns.

Note "workers". Processes that load data end when nothing refers any more to what iterates over the loader. If
the garbage collector has to find that, it may close the workers' queues first; then they hear nothing, and
the collection stands for five seconds for each of them. So a feed is closed.

Note "unequal ends". Ranks that read streams of their own may run out at different times. One
that has nothing left takes part with a batch it has had before, which counts for nothing, until
all are through. A rank that never had one borrows it from another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader

from paceline.errors import ArgumentError
from paceline.train import batches, data
from paceline.train.arguments import TrainingArguments
from paceline.train.collectives import Collectives
from paceline.train.dispatching import loader_of, ranks_read_for
from paceline.train.orders import even_part
from paceline.train.streams import Loaded, Stream, stream_loader

_LOADER_SETTINGS = (
    "num_workers",
    "pin_memory",
    "persistent_workers",
    "prefetch_factor",
    "multiprocessing_context",
    "worker_init_fn",
)


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
class StepData:
    """What one step works on.

    Attributes:
        micro_batches: of this rank; equally many on every rank.
        samples: over all ranks and micro-batches.
    """

    micro_batches: list[MicroBatch]
    samples: int


class Feed(Protocol):
    """Gives the steps of one epoch after the other.

    Attributes:
        loader: what the batches come from.
        steps: optimizer steps of an epoch; of a stream without length those of the whole run.
        global_size: samples of a full step.
        num_samples: samples of an epoch; None if nobody knows.
    """

    loader: Any

    @property
    def steps(self) -> int:
        """See above."""

    @property
    def global_size(self) -> int:
        """See above."""

    @property
    def num_samples(self) -> int | None:
        """See above."""

    def start_at(self, epoch: int, step: int) -> None:
        """Let `next_step` give step `step` of `epoch` next."""

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint must hold for the place in the data to be found at once; None for nothing."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Take what `state` gave; it counts for the next `start_at`."""

    def next_step(self) -> StepData | None:
        """The next step, on all ranks; None on all ranks when the epoch is over."""

    def close(self) -> None:
        """Training is over: end the processes that load data."""


class PlannedFeed:
    """Steps of a data set with indices; needs no word between the ranks.

    Args:
        loader: whose batch sampler knows the plan.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.batches: Any = loader.batch_sampler
        self._loaded: Iterator[Any] = iter(())
        self._step = 0

    @property
    def steps(self) -> int:
        """Optimizer steps of an epoch."""
        steps: int = self.batches.steps
        return steps

    @property
    def global_size(self) -> int:
        """Samples of a full step."""
        size: int = self.batches.global_size
        return size

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch."""
        samples: int = self.batches.num_samples
        return samples

    def start_at(self, epoch: int, step: int) -> None:
        """Let `next_step` give step `step` of `epoch` next; earlier ones take no time."""
        self.batches.start_at(epoch, step)
        self._loaded, self._step = self._load(), step

    def next_step(self) -> StepData | None:
        """The next step; None when the epoch is over."""
        if self._step >= self.steps:
            return None
        sizes, samples = self.batches.share_sizes(self._step), self.batches.step_size(self._step)
        self._step += 1
        return StepData([MicroBatch(next(self._loaded), size) for size in sizes], samples)

    def state(self) -> None:
        """Nothing: the place is a function of epoch and step."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """End the processes that load data."""
        self._loaded = iter(())
        _end_persistent_workers(self.loader)

    def _load(self) -> Iterator[Any]:
        """What the loader gives; without workers from its parts at once, which takes half the time."""
        loader = self.loader
        direct = type(loader) is DataLoader and not loader.num_workers and not loader.pin_memory
        if not direct or not isinstance(loader.dataset, data.SeededDataset):
            return iter(loader)
        return (loader.collate_fn(loader.dataset.__getitems__(share)) for share in self.batches)


class UnorderedFeed(PlannedFeed):
    """The same with dataloader_in_order=False: which batches a step gets is up to the workers' speed.

    So before each step the ranks add up how many samples it has.
    """

    def __init__(self, loader: DataLoader[Any], args: TrainingArguments, collectives: Collectives) -> None:
        super().__init__(loader)
        self._args, self._collectives = args, collectives

    def next_step(self) -> StepData | None:
        """The next step; None when the epoch is over."""
        if self._step >= self.steps:
            return None
        number = len(self.batches.share_sizes(self._step))
        self._step += 1
        own = [MicroBatch(inputs, samples) for inputs, samples in islice(self._loaded, number)]
        samples = torch.tensor(sum(each.samples for each in own), device=self._args.device)
        return StepData(own, int(self._collectives.sum(samples, "counting the samples of the next step")))


class StreamFeed:
    """Steps of a stream: the ranks agree before each what it consists of.

    Args:
        loader: gives `Loaded`, or batches as they are (then each rank has its own).
        args: the settings.
        collectives: to agree with.
        per_rank: samples of a full micro-batch on one rank, if known.
    """

    def __init__(
        self, loader: Any, args: TrainingArguments, collectives: Collectives, per_rank: int | None = None
    ) -> None:
        self.loader, self._args, self._collectives = loader, args, collectives
        self._accumulation = args.gradient_accumulation_steps
        self._micro_size = (per_rank or args.train_batch_size) * args.world_size
        self._loaded: Iterator[Any] = iter(())
        self._spare: Any = None
        self._saved: dict[str, Any] | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps of an epoch, if the stream has a length; else those of the run."""
        samples = self.num_samples
        if samples is None:
            return self._args.max_steps
        return max(1, -(-samples // self.global_size))

    @property
    def global_size(self) -> int:
        """Samples of a full step."""
        return self._micro_size * self._accumulation

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch, if the stream has a length."""
        dataset = getattr(self.loader, "dataset", None)
        source: Any = dataset.dataset if isinstance(dataset, Stream) else None
        return len(source) if hasattr(source, "__len__") else None

    def start_at(self, epoch: int, step: int) -> None:
        """Let `next_step` give step `step` of `epoch` next; earlier ones are read and left out.

        Unless `load_state` was given where the stream stood there.
        """
        stream, skipped = getattr(self.loader, "dataset", None), step * self._accumulation
        saved, self._saved = self._saved, None
        if isinstance(stream, Stream):
            stream.start_at(epoch, skipped, saved if step else None)
            self._loaded = iter(self.loader)
        else:
            if hasattr(self.loader, "set_epoch"):
                self.loader.set_epoch(epoch)
            self._loaded = islice(iter(self.loader), skipped, None)

    def state(self) -> dict[str, Any] | None:
        """Where the stream stands, if this process reads it and the data set can say."""
        stream = getattr(self.loader, "dataset", None)
        return stream.state() if isinstance(stream, Stream) and not self.loader.num_workers else None

    def load_state(self, state: dict[str, Any]) -> None:
        """Take what `state` gave, here or on another rank; it counts for the next `start_at`."""
        stream = getattr(self.loader, "dataset", None)
        if isinstance(stream, Stream) and not self.loader.num_workers:
            self._saved = state

    def next_step(self) -> StepData | None:
        """The next step; None on all ranks when no rank has anything left."""
        own = [self._micro_batch(each) for each in islice(self._loaded, self._accumulation)]
        if own:
            self._spare = own[-1].inputs
        facts = [len(own), sum(each.samples for each in own), int(self._spare is not None)]
        everyone = self._tell(facts)
        longest, samples = int(everyone[:, 0].max()), int(everyone[:, 1].sum())
        if longest == 0 or (self._args.dataloader_drop_last and samples < self.global_size):
            return None
        if not everyone[:, 2].all():
            self._borrow(int(everyone[:, 2].argmax()))
        missing = longest - len(own)
        return StepData(own + [MicroBatch(self._spare, 0)] * missing, samples)

    def close(self) -> None:
        """End the processes that load data."""
        self._loaded = iter(())
        _end_persistent_workers(self.loader)

    def _micro_batch(self, loaded: Any) -> MicroBatch:
        if isinstance(loaded, Loaded):
            return MicroBatch(loaded.inputs, loaded.samples)
        return MicroBatch(loaded, batches.batch_size_of(loaded))

    def _tell(self, facts: list[int]) -> torch.Tensor:
        """The facts of all ranks, int64 of shape (ranks, facts), on the CPU of every rank."""
        told = torch.tensor(facts, device=self._args.device)
        return self._collectives.gather(told, "agreeing on the data of the next step").cpu()

    def _borrow(self, lender: int) -> None:
        """Take a batch of another rank where there never was one."""
        batch = [batches.to_device(self._spare, torch.device("cpu")) if dist.get_rank() == lender else None]
        dist.broadcast_object_list(batch, src=lender)
        if self._spare is None:
            self._spare = batch[0]


def feed_of(loader: Any, args: TrainingArguments, collectives: Collectives) -> Feed:
    """What gives the steps that come from `loader`.

    Its samples are dealt out to the ranks: by its sampler, by its batch sampler (each batch as it is),
    or as a stream. Anything that is no DataLoader gives each rank's own batches.

    Raises:
        ArgumentError: a stream without length, and max_steps is not set.
    """
    if not isinstance(loader, DataLoader):
        return _checked(StreamFeed(loader, args, collectives), args)
    if isinstance(loader.dataset, data.CountedBatches):
        return UnorderedFeed(loader, args, collectives)
    if isinstance(loader.batch_sampler, (data.StepBatches, data.WholeBatches)):
        return PlannedFeed(loader)
    if isinstance(loader.dataset, Stream):
        return _checked(StreamFeed(loader, args, collectives), args)
    if data.is_stream(loader.dataset):
        per_rank = loader.batch_size or args.train_batch_size
        dealt = stream_loader(loader.dataset, loader.collate_fn, args, per_rank, True, **_settings(loader))
        return _checked(StreamFeed(dealt, args, collectives, per_rank), args)
    return PlannedFeed(_redealt(loader, args))


def eval_loader_of(loader: Any, args: TrainingArguments) -> Any:
    """The same for a loader of evaluation data: a loader of this rank's part."""
    if not isinstance(loader, DataLoader) or isinstance(loader.batch_sampler, data.EvalBatches):
        return loader
    if isinstance(loader.dataset, Stream):
        return loader
    if data.is_stream(loader.dataset):
        per_rank = loader.batch_size or args.eval_batch_size
        return stream_loader(loader.dataset, loader.collate_fn, args, per_rank, False, **_settings(loader))
    if type(loader.batch_sampler) is BatchSampler:
        batches = data.eval_batches(loader.sampler, args, loader.batch_size)
    else:
        whole = [list(batch) for batch in _batch_sampler(loader)]
        batches = data.EvalBatches(lambda rank: _part(whole, args.world_size, rank), args)
    return data.eval_loader(loader.dataset, batches, loader.collate_fn, args, **_settings(loader))


def _end_persistent_workers(loader: Any) -> None:
    if isinstance(loader, DataLoader) and loader.persistent_workers:
        loader._iterator = None


def _part(whole: list[list[int]], world_size: int, rank: int) -> list[list[int]]:
    positions = even_part(len(whole), world_size, rank)
    return whole[positions.start : positions.stop]


def _redealt(loader: DataLoader[Any], args: TrainingArguments) -> DataLoader[Any]:
    """A loader with indices whose samples, or whole batches, go to the ranks in turn."""
    if type(loader.batch_sampler) is BatchSampler and hasattr(loader.sampler, "__len__"):
        return data.train_loader(
            loader.dataset, loader.sampler, loader.collate_fn, args, loader.batch_size, **_settings(loader)
        )
    batches = data.WholeBatches(
        _batch_sampler(loader),
        args.world_size,
        args.gradient_accumulation_steps,
        args.process_index,
        args.seed,
        ranks_read_for(args),
    )
    seeded = data.SeededDataset(loader.dataset)
    return loader_of(args, seeded, batch_sampler=batches, collate_fn=loader.collate_fn, **_settings(loader))


def _batch_sampler(loader: DataLoader[Any]) -> Any:
    if loader.batch_sampler is not None:
        return loader.batch_sampler
    raise ArgumentError(
        "the data loader has batch_size=None, so there are no batches to deal out to the ranks; give it "
        "batch_size, or a batch_sampler"
    )


def _settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """What the user's loader says about worker processes."""
    return {name: getattr(loader, name) for name in _LOADER_SETTINGS}


def _checked(feed: StreamFeed, args: TrainingArguments) -> StreamFeed:
    if feed.num_samples is None and args.max_steps <= 0:
        raise ArgumentError(
            "the training data has no length, so num_train_epochs does not say when to stop; set max_steps"
        )
    return feed
