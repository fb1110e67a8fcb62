"""Which parameters took part, on which rank: the tail of every pass.

Each synchronising pass ends with a few float32 (or float64) numbers that are averaged
together with the last bucket, so that they cost no collective of their own. Layout,
for W ranks, P parameters and B buckets:

    [0, W)               pass number of each rank, modulo 2**20; rank r writes entry r
    [W, 2W)              fingerprint of each rank's bucket plan
    [2W, 3W)             number of each rank's training forwards outside no_sync, modulo 2**20
    [3W, 4W)             each rank's standing: it took part, its backward raised, or it has run out of data
    [4W, 5W)             fingerprint of the names and forms of each rank's buffers
    [5W, 5W+P)           1 where this rank holds a gradient of the parameter
    [5W+P, 5W+2P)        1 where a backward of this rank reached the parameter since the last check
    [5W+2P, 5W+2P+B)     1 where gradient came after the bucket had been launched

An average over W ranks times W is the sum, exact after rounding because every entry is
a whole number far below the mantissa's range.

Note "ranks out of step": nothing in a sum says which step it belongs to. The first three
blocks let every rank see when it was averaged with another step, or another plan; the
forwards show it when a rank has skipped a backward.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.engine.plan import FINGERPRINT_MODULUS

_DTYPE = torch.float32  # of what is written, whatever the user has made the default


class Standing(enum.IntEnum):
    """How a rank stands in a pass."""

    TOOK_PART = 0
    RAISED = 1
    OUT_OF_DATA = 2

    @property
    def has_data(self) -> bool:
        """Whether the rank still runs forwards of its own."""
        return self is not Standing.OUT_OF_DATA


@dataclass(frozen=True)
class TailLayout:
    """Where each block of the tail lies.

    Attributes:
        world_size: W, number of ranks.
        parameters: P, number of parameters in the plan.
        buckets: B, number of buckets in the plan.
    """

    world_size: int
    parameters: int
    buckets: int

    @property
    def numel(self) -> int:
        """Number of elements of the whole tail."""
        return 5 * self.world_size + 2 * self.parameters + self.buckets

    @functools.cached_property
    def _usual_body(self) -> Tensor:
        """What follows the blocks of ranks where every rank holds and reached everything in time."""
        return torch.tensor([1.0] * (2 * self.parameters) + [0.0] * self.buckets, dtype=_DTYPE, device="cpu")

    def write(self, tail: Tensor, report: RankReport) -> None:
        """Write what this rank has to say into ``tail``, a 1-d float tensor of ``numel`` elements."""
        head = torch.zeros(5, self.world_size, dtype=_DTYPE, device="cpu")
        head[:, report.rank] = torch.tensor(
            [
                float(report.pass_number % FINGERPRINT_MODULUS),
                report.plan_fingerprint,
                report.forwards % FINGERPRINT_MODULUS,
                report.standing,
                report.buffer_forms,
            ],
            dtype=_DTYPE,
            device="cpu",
        )
        tail.copy_(torch.cat((head.flatten(), self._usual_body)))
        start = head.numel()
        _mark(tail, start, report.without_gradient, 0)
        _mark(tail, start + self.parameters, report.unreached, 0)
        _mark(tail, start + 2 * self.parameters, report.late_buckets, 1)

    def read(self, tail: Tensor) -> PassVerdict:
        """Read the averaged tail; the same verdict comes out on every rank."""
        world, count = self.world_size, self.parameters
        sums = (tail.cpu() * world).round_()
        blocks = [int(value) for value in sums[: 5 * world].tolist()]
        body = sums[5 * world :]
        usual = torch.equal(body, (self._usual_body * world).to(body.dtype))
        counts = [] if usual else [int(value) for value in body.tolist()]
        everyone = usual or all(value == world for value in counts[: 2 * count])
        return PassVerdict(
            pass_numbers=blocks[:world],
            plan_fingerprints=blocks[world : 2 * world],
            forwards=blocks[2 * world : 3 * world],
            standings=[Standing(value) for value in blocks[3 * world : 4 * world]],
            buffer_forms=blocks[4 * world :],
            holders=None if everyone else counts[:count],
            users=None if everyone else counts[count : 2 * count],
            late_buckets=[bucket for bucket, value in enumerate(counts[2 * count :]) if value],
        )


@dataclass(frozen=True)
class RankReport:
    """What one rank says at the end of its pass."""

    rank: int
    pass_number: int
    plan_fingerprint: int
    forwards: int
    standing: Standing
    buffer_forms: int
    without_gradient: list[int]
    unreached: list[int]
    late_buckets: list[int]


@dataclass(frozen=True)
class PassVerdict:
    """What all ranks said together.

    Attributes:
        pass_numbers: each rank's pass number modulo 2**20.
        plan_fingerprints: each rank's plan fingerprint.
        forwards: each rank's number of training forwards outside no_sync, modulo 2**20.
        standings: how each rank stands in the pass.
        buffer_forms: fingerprint of the names and forms of each rank's buffers.
        holders: per parameter, how many ranks hold a gradient; None when all ranks hold all.
        users: per parameter, how many ranks reached it; None when all reached all.
        late_buckets: buckets to reduce once more.
    """

    pass_numbers: list[int]
    plan_fingerprints: list[int]
    forwards: list[int]
    standings: list[Standing]
    buffer_forms: list[int]
    holders: list[int] | None
    users: list[int] | None
    late_buckets: list[int]

    def in_step(self) -> bool:
        """Whether all ranks were in the same pass with the same plan, after as many forwards."""
        return (
            len(set(self.pass_numbers)) == 1
            and len(set(self.plan_fingerprints)) == 1
            and len(
                {count for count, rank in zip(self.forwards, self.standings, strict=True) if rank.has_data}
            )
            <= 1
        )

    def buffers_alike(self) -> bool:
        """Whether all ranks held buffers of the same names and forms when this very pass ended."""
        return self.in_step() and not self.failed_ranks() and len(set(self.buffer_forms)) == 1

    def failed_ranks(self) -> list[int]:
        """Ranks whose backward raised."""
        return [rank for rank, standing in enumerate(self.standings) if standing is Standing.RAISED]

    def active_ranks(self) -> int:
        """Number of ranks that still have data."""
        return sum(standing.has_data for standing in self.standings)

    def held_nowhere(self) -> frozenset[int]:
        """Parameters for which no rank holds a gradient."""
        return frozenset() if self.holders is None else _where(self.holders, 0)

    def unused_somewhere(self, world_size: int) -> dict[int, int]:
        """Parameters that some rank did not reach -> number of ranks that did."""
        if self.users is None:
            return {}
        return {index: count for index, count in enumerate(self.users) if count < world_size}


def _where(values: Iterable[int], wanted: int) -> frozenset[int]:
    return frozenset(index for index, value in enumerate(values) if value == wanted)


def _mark(tail: Tensor, start: int, indices: list[int], value: float) -> None:
    if indices:
        where = torch.tensor(indices, dtype=torch.long, device=tail.device)
        tail[start:].index_fill_(0, where, value)
