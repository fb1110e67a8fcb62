"""dispatch_batches: rank 0 alone reads the data, and gives every rank its batches.

    rank 0         read and collate the shares of all ranks -> pickle -> scatter
    other ranks                                                scatter -> unpickle

What is read is what each rank would have read itself: the same shares in the same order with the same random
numbers, interleaved by rank. So the numbers of a run do not depend on who reads, and batches need not be of
one shape, as they would if whole ones were sent and cut.

Note "rounds". One round is a batch for each rank. Parts get smaller by rank, so when data ends, the last
ranks may have none: a round with fewer batches than ranks is the last, and all ranks know that it is.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from paceline.errors import PeerFailedError
from paceline.recorder.ring import recorder
from paceline.train import rules
from paceline.train.arguments import TrainingArguments
from paceline.train.batches import to_device
from paceline.train.collectives import Collectives

_WHAT = "getting batches from rank 0 (dispatch_batches)"
_KEPT = b"-"  # sent to rank 0 itself, whose batch stays where it is


def is_dispatched(args: TrainingArguments) -> bool:
    """Whether rank 0 reads for all."""
    return bool(rules.config_of(args).dispatch_batches) and args.world_size > 1


def ranks_read_for(args: TrainingArguments) -> range:
    """The ranks whose shares a loader reads: this one, or all with dispatch_batches."""
    own = args.process_index
    return range(args.world_size) if is_dispatched(args) else range(own, own + 1)


def loader_of(args: TrainingArguments, dataset: Any, **settings: Any) -> DataLoader[Any]:
    """A DataLoader that gives this rank's batches.

    Args:
        args: the settings.
        dataset: gives, in turn, the shares of `ranks_read_for`.
        settings: for the DataLoader.
    """
    if is_dispatched(args):
        return DispatchingLoader(args, dataset, **settings)
    return DataLoader(dataset, **settings)


class DispatchingLoader(DataLoader[Any]):
    """Gives this rank's batches of what rank 0 reads; all ranks must iterate in step.

    Args:
        args: the settings.
        dataset: gives the shares of all ranks in turn; read on rank 0 alone.
        settings: for the DataLoader.
    """

    def __init__(self, args: TrainingArguments, dataset: Any, **settings: Any) -> None:
        super().__init__(dataset, **settings)
        self._args = args

    def __len__(self) -> int:
        return math.ceil(super().__len__() / self._args.world_size)

    def __iter__(self) -> Any:
        source: Iterator[Any] = super().__iter__() if self._args.process_index == 0 else iter(())
        return _own_batches(source, Collectives(lambda: f"step {recorder().step}"), self._args.device)


def _own_batches(source: Iterator[Any], collectives: Collectives, device: torch.device) -> Iterator[Any]:
    """This rank's batch of each round.

    Args:
        source: of the batches of all ranks in turn, on rank 0; empty elsewhere.
        collectives: to send them with.
        device: that tensors must be on to be sent.

    Raises:
        PeerFailedError: reading raised on rank 0 (where the exception itself goes on).
    """
    rank, complete = collectives.rank, True
    while complete:
        kept, packed, error = _read_round(source, collectives) if rank == 0 else (None, [], None)
        sizes = torch.zeros(collectives.world_size, dtype=torch.int64, device=device)
        sizes[: len(packed)] = torch.tensor([len(each) for each in packed], dtype=torch.int64, device=device)
        collectives.sum(sizes, _WHAT)
        complete = bool(sizes.all())
        if not sizes.any():
            return
        received = collectives.scatter(_as_rows(packed, sizes), _row(sizes), _WHAT)
        if error is not None:
            raise error
        if sizes[rank]:
            yield kept if rank == 0 else _unpacked(received[: int(sizes[rank])], rank)


def _read_round(
    source: Iterator[Any], collectives: Collectives
) -> tuple[Any, list[bytes], BaseException | None]:
    """Read a batch for each rank: rank 0's own, what to send by rank, and what reading raised instead."""
    try:
        read = list(islice(source, collectives.world_size))
        cpu = torch.device("cpu")
        others = [pickle.dumps((True, to_device(each, cpu))) for each in read[1:]]
        return (read[0], [_KEPT, *others], None) if read else (None, [], None)
    except Exception as error:
        told = pickle.dumps((False, f"{type(error).__name__}: {error}"))
        return None, [told] * collectives.world_size, error


def _row(sizes: Tensor) -> Tensor:
    return torch.empty(int(sizes.max()), dtype=torch.uint8, device=sizes.device)


def _as_rows(packed: list[bytes], sizes: Tensor) -> list[Tensor]:
    """What is sent to each rank, filled up to one length; empty on the ranks that send nothing."""
    rows = [_row(sizes) for _ in sizes] if packed else []
    for row, each in zip(rows, packed, strict=False):
        row[: len(each)] = torch.frombuffer(bytearray(each), dtype=torch.uint8)
    return rows


def _unpacked(received: Tensor, rank: int) -> Any:
    went_well, value = pickle.loads(received.cpu().numpy().tobytes())
    if not went_well:
        raise PeerFailedError(f"rank {rank} waited for a batch of rank 0, where reading it raised {value}")
    return value
