"""Iterable data sets: every sample once, in the stream's order, with any number of ranks and workers.

Each rank, and each worker process of a rank, reads the stream from its beginning and keeps what
is its own. Micro-batch k of the run takes the next `per_rank * world_size` samples, whatever the
layout, and each rank gets an even part of it. So the same global batches come about as with a
data set that has indices, and nobody needs to know beforehand where the stream ends.

Note "a stream is read as if there were one worker". Some data sets look at
``torch.utils.data.get_worker_info()`` and give each worker another part; others do not, and give
each worker everything. The two cannot be told apart. While a stream is read, that function
therefore says that there are no workers, so both give everything, and the positions decide.

Note "a stream that knows its place". Resuming reads a stream up to its place again, unless the data set
has ``state_dict`` and ``load_state_dict``, and this process reads it itself (no workers): then its state
is part of a checkpoint, and the place is found at once. Not so with a shuffle buffer of ``datasets``, which
forgets what it holds.

Note "a stream's random numbers are its own". A stream that shuffles or augments must give
the same samples on all ranks, so it draws from generators of its own (`OwnGenerators`), seeded by
the seed and the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from paceline.errors import ArgumentError
from paceline.train.arguments import TrainingArguments
from paceline.train.data import loading_settings
from paceline.train.dispatching import is_dispatched, loader_of, ranks_read_for
from paceline.train.orders import even_part
from paceline.train.randomness import OwnGenerators, derive_seed, seed_again


@dataclass(frozen=True)
class Dealing:
    """How a stream is dealt out.

    Attributes:
        per_rank: samples of one micro-batch on one rank.
        world_size: ranks that share the stream; 1 if each reads a stream of its own.
        read_for: the ranks whose shares are given, in turn.
        seed: of what is random in the stream and in loading.
        keep_empty: give an empty share as one sample that counts for nothing; otherwise leave it out.
    """

    per_rank: int
    world_size: int
    read_for: range
    seed: int
    keep_empty: bool


class Loaded(NamedTuple):
    """This rank's share of a micro-batch: what the collator made of it, and how many samples count."""

    inputs: Any
    samples: int


@dataclass
class Raw:
    """The same before the collator: samples, how many of them count, and the seed for the collator."""

    samples: list[Any]
    count: int
    seed: int


class Stream(IterableDataset[Raw]):
    """One rank's shares of a stream, micro-batch by micro-batch.

    Args:
        dataset: the user's iterable.
        dealing: how it is dealt out.
        shared: a worker outlives an epoch, so the place must be where it can see it.
    """

    def __init__(self, dataset: Any, dealing: Dealing, shared: bool = False) -> None:
        self.dataset = dataset
        self.dealing = (
            replace(dealing, world_size=1, read_for=range(1)) if _split_already(dataset) else dealing
        )
        self._place = torch.zeros(2, dtype=torch.int64, device="cpu")
        if shared:
            self._place.share_memory_()
        self._saved: Mapping[str, Any] | None = None
        self._generators: OwnGenerators | None = None
        self._ended = False

    def start_at(self, epoch: int, micro_batches: int, saved: Mapping[str, Any] | None = None) -> None:
        """Let the next pass be over `epoch`, leaving out so many micro-batches.

        They are read, unless `saved` is what `state` said when so many were through.
        """
        self._place[0], self._place[1] = epoch, micro_batches
        self._saved = saved

    def state(self) -> dict[str, Any] | None:
        """Where this process's reading stands, to be saved; None if the data set cannot say."""
        if self._generators is None or not _knows_its_place(self.dataset) or _split_already(self.dataset):
            return None
        if self._ended:  # what data sets say then may mean the beginning
            return {"ended": True}
        return {"dataset": deepcopy(self.dataset.state_dict()), "generators": self._generators.states}

    def __iter__(self) -> Iterator[Raw]:
        worker = get_worker_info()
        number_of_worker, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        epoch, skipped = self._place.tolist()
        first = skipped if self._saved is not None else 0
        for number, group in enumerate(self._groups(epoch), start=first):
            due = (number - skipped) * len(self.dealing.read_for)
            for place, share in enumerate(self._shares(group, epoch, number), start=due):
                if place >= 0 and place % workers == number_of_worker:
                    yield share

    def _groups(self, epoch: int) -> Iterator[list[Any]]:
        """The samples of one micro-batch after the other, over all ranks."""
        size = self.dealing.per_rank * self.dealing.world_size
        generators = OwnGenerators(derive_seed("stream", self.dealing.seed, epoch))
        saved, self._saved, source = self._saved, None, None
        self._generators, self._ended = generators, saved is not None and "ended" in saved
        if self._ended:
            return
        if saved is not None:
            generators.states = saved["generators"]
        while True:
            with generators.in_place(), _as_if_no_worker():
                if source is None:
                    source = self._open(epoch, saved)
                group = list(islice(source, size))
            self._ended = len(group) < size
            if not group:
                return
            yield group

    def _open(self, epoch: int, saved: Mapping[str, Any] | None) -> Iterator[Any]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        if saved is not None:
            self.dataset.load_state_dict(saved["dataset"])
        return iter(self.dataset)

    def _shares(self, group: list[Any], epoch: int, number: int) -> Iterator[Raw]:
        """What of one micro-batch is to be given; an empty share stands behind the others, if at all."""
        for rank in self.dealing.read_for:
            own = even_part(len(group), self.dealing.world_size, rank)
            if own or self.dealing.keep_empty:
                samples = group[own.start : own.stop] or group[:1]
                seed = derive_seed("load", self.dealing.seed, epoch, number, rank)
                yield Raw(samples, len(own), seed)


class SeededCollator:
    """Collates a share with random numbers (for masks, say) that are a function of the share."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, share: Raw) -> Loaded:
        seed_again(share.seed)
        return Loaded(self.collate(share.samples), share.count)


def stream_loader(
    dataset: Any,
    collate: Any,
    args: TrainingArguments,
    per_rank: int,
    training: bool,
    **loading: Any,
) -> DataLoader[Any]:
    """The loader of this rank's shares of a stream; gives `Loaded`.

    Args:
        dataset: the user's iterable.
        collate: makes a batch of a list of samples.
        args: the settings.
        per_rank: samples of one micro-batch on one rank.
        training: whether it is for training, where a rank whose share is empty must take part.
        loading: for the DataLoader, instead of what `args` say.

    Raises:
        ArgumentError: rank 0 is to read for all, but has only a part of the stream.
    """
    settings = loading_settings(args, training, loading)
    seed = args.seed if args.data_seed is None else args.data_seed
    if is_dispatched(args) and _split_already(dataset):
        raise ArgumentError(
            "accelerator_config: with dispatch_batches=True rank 0 reads for all, but of this data set it "
            "has only its own part (split_dataset_by_node); give it the whole, or leave dispatch_batches out"
        )
    dealing = Dealing(per_rank, args.world_size, ranks_read_for(args), seed, keep_empty=training)
    stream = Stream(dataset, dealing, shared=bool(settings["persistent_workers"]))
    seeded: Any = SeededCollator(collate)
    return loader_of(args, stream, batch_size=None, collate_fn=seeded, **settings)


def _split_already(dataset: Any) -> bool:
    """Whether `datasets.distributed.split_dataset_by_node` has given each rank a stream of its own."""
    return getattr(dataset, "_distributed", None) is not None


def _knows_its_place(dataset: Any) -> bool:
    """Whether a data set can say where its reading stands, and go on from there with the very next sample."""
    if not hasattr(dataset, "state_dict") or not hasattr(dataset, "load_state_dict"):
        return False
    source: Any = getattr(dataset, "_ex_iterable", None)  # of `datasets`: the stages of its pipeline
    while source is not None:
        if "Shuffled" in type(source).__name__:
            return False
        source = getattr(source, "ex_iterable", None)
    return True


@contextmanager
def _as_if_no_worker() -> Iterator[None]:
    """A block in which `get_worker_info` says None; the head of this file says why."""
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info
