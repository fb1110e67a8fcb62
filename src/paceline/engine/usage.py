"""Which parameters took part, on which rank: the tail of every pass.

Each synchronising pass ends with a few float32 (or float64) numbers that are averaged
together with the last bucket, so that they cost no collective of their own. Layout,
for W ranks, P parameters and B buckets:

    [0, W)               pass number of each rank, modulo 2**20; rank r writes entry r
    [W, 2W)              fingerprint of each rank's bucket plan
    [2W, 3W)             each rank's standing: it took part, its backward raised, or it has run out of data
    [3W, 3W+P)           1 where this rank holds a gradient of the parameter
    [3W+P, 3W+2P)        1 where a backward of this rank reached the parameter since the last check
    [3W+2P, 3W+2P+B)     1 where gradient came after the bucket had been launched

An average over W ranks times W is the sum, exact after rounding because every entry is
a whole number far below the mantissa's range.

Note "ranks out of step": nothing in a sum says which step it belongs to. The first two
blocks let every rank see when it was averaged with another step, or another plan.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.engine.plan import FINGERPRINT_MODULUS


class Standing(enum.IntEnum):
    """How a rank stands in a pass."""

    TOOK_PART = 0
    RAISED = 1
    OUT_OF_DATA = 2


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
        return 3 * self.world_size + 2 * self.parameters + self.buckets

    def write(self, tail: Tensor, report: RankReport) -> None:
        """Write what this rank has to say into ``tail``, a 1-d float tensor of ``numel`` elements."""
        world, head = self.world_size, 3 * self.world_size
        tail[:head].zero_()
        tail[report.rank] = report.pass_number % FINGERPRINT_MODULUS
        tail[world + report.rank] = report.plan_fingerprint
        tail[2 * world + report.rank] = report.standing
        tail[head : head + 2 * self.parameters].fill_(1)
        tail[head + 2 * self.parameters :].zero_()
        _mark(tail, head, report.without_gradient, 0)
        _mark(tail, head + self.parameters, report.unreached, 0)
        _mark(tail, head + 2 * self.parameters, report.late_buckets, 1)

    def read(self, tail: Tensor) -> PassVerdict:
        """Read the averaged tail; the same verdict comes out on every rank."""
        world, count = self.world_size, self.parameters
        sums = (tail * world).round_()
        blocks = sums[: 3 * world].long().tolist()
        body = sums[3 * world : 3 * world + 2 * count]
        late = sums[3 * world + 2 * count :]
        everyone = bool((body == world).all())
        counts = [] if everyone else body.long().tolist()
        return PassVerdict(
            pass_numbers=blocks[:world],
            plan_fingerprints=blocks[world : 2 * world],
            standings=[Standing(value) for value in blocks[2 * world :]],
            holders=None if everyone else counts[:count],
            users=None if everyone else counts[count:],
            late_buckets=late.nonzero().flatten().tolist(),
        )


@dataclass(frozen=True)
class RankReport:
    """What one rank says at the end of its pass."""

    rank: int
    pass_number: int
    plan_fingerprint: int
    standing: Standing
    without_gradient: list[int]
    unreached: list[int]
    late_buckets: list[int]


@dataclass(frozen=True)
class PassVerdict:
    """What all ranks said together.

    Attributes:
        pass_numbers: each rank's pass number modulo 2**20.
        plan_fingerprints: each rank's plan fingerprint.
        standings: how each rank stands in the pass.
        holders: per parameter, how many ranks hold a gradient; None when all ranks hold all.
        users: per parameter, how many ranks reached it; None when all reached all.
        late_buckets: buckets to reduce once more.
    """

    pass_numbers: list[int]
    plan_fingerprints: list[int]
    standings: list[Standing]
    holders: list[int] | None
    users: list[int] | None
    late_buckets: list[int]

    def in_step(self) -> bool:
        """Whether all ranks were in the same pass with the same plan."""
        return len(set(self.pass_numbers)) == 1 and len(set(self.plan_fingerprints)) == 1

    def failed_ranks(self) -> list[int]:
        """Ranks whose backward raised."""
        return [rank for rank, standing in enumerate(self.standings) if standing is Standing.RAISED]

    def active_ranks(self) -> int:
        """Number of ranks that still have data."""
        return sum(standing is not Standing.OUT_OF_DATA for standing in self.standings)

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


@dataclass(frozen=True)
class UnusedParameter:
    """A parameter that some rank's backward did not reach in a synchronising pass.

    Attributes:
        index: its index among the trained parameters.
        name: its dotted name.
        users: number of ranks that did reach it.
        reached_here: whether this rank did.
    """

    index: int
    name: str
    users: int
    reached_here: bool


def words_for_unused(rank: int, world_size: int, number: int, unused: list[UnusedParameter]) -> str:
    """The text of the error for parameters without gradient; begins with torch's key phrases."""
    here = [p for p in unused if not p.reached_here]
    elsewhere = [p for p in unused if p.reached_here]
    lines = [
        "Expected to have finished reduction in the prior iteration before starting a new one.",
        f"Rank {rank}: backward pass {number} left parameters without gradient. The gradients of that pass were "
        "averaged correctly (a rank without gradient counts as zero), but this wrapper was told that every "
        "parameter takes part.",
        "Write DistributedDataParallel(..., find_unused_parameters=True), which costs nothing here: that is, "
        "passing the keyword argument `find_unused_parameters=True`. Or, if it is a mistake, make sure that all "
        "`forward` function outputs participate in calculating loss.",
    ]
    if elsewhere:
        counted = ", ".join(f"{p.name} (reached on {p.users} of {world_size} ranks)" for p in elsewhere)
        lines.append(f"Parameters that this rank used and other ranks did not: {counted}.")
    if here:
        modules = sorted({p.name.rpartition(".")[0] or "the wrapped module itself" for p in here})
        lines += [
            f"They sit in: {', '.join(modules)}. There is no need to set the environment variable "
            "TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL: these are all the names.",
            f"Parameters which did not receive grad for rank {rank}: {', '.join(p.name for p in here)}",
            f"Parameter indices which did not receive grad for rank {rank}: {' '.join(str(p.index) for p in here)}",
        ]
    return "\n".join(lines)


def words_for_changed_graph(rank: int, number: int, unreached: list[tuple[int, str]], others: list[str]) -> str:
    """The text of the error for a graph that was declared static and changed."""
    if not unreached:
        return (
            f"Your training graph has changed in this iteration (rank {rank}, backward pass {number}): "
            f"{', '.join(others)} took part more or less often than in the first pass. This is not compatible with "
            "static_graph set to True; write static_graph=False."
        )
    indices = " ".join(str(index) for index, _ in unreached)
    names = ", ".join(name for _, name in unreached)
    return (
        "Expected to have finished reduction in the prior iteration before starting a new one. This error "
        "indicates that your training graph has changed in this iteration, e.g., one parameter is used in first "
        "iteration, but then got unused in the second iteration. this is not compatible with static_graph set to "
        f"True.\nParameter indices which did not receive grad for rank {rank}: {indices}\n"
        f"Parameters which did not receive grad for rank {rank}, backward pass {number}: {names}"
    )
