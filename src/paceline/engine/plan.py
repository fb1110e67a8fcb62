"""Sizes and an order of arrival in, a bucket plan out.

Pure: no torch.distributed, no tensors. A plan says which parameters travel together
and in which order the buckets are launched. All ranks must compute the same plan, so
everything here is a function of its arguments alone.

Note "the tail is what you pay for": a bucket launched early hides behind the rest of
backward, the last one never does. So the first bucket is small (communication starts
early) and the last one is kept small too (little is left to wait for).
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass

MIB = 1024 * 1024
FINGERPRINT_MODULUS = 1 << 20  # small enough to travel exactly as a float32


@dataclass(frozen=True)
class ParameterSpec:
    """What the plan has to know of one parameter.

    Attributes:
        name: its dotted name in the module.
        shape: its shape.
        element_size: bytes per element.
        kind: parameters share a bucket only if their kinds are equal (dtype and device).
        sparse: its gradient is a sparse tensor, which travels alone.
    """

    name: str
    shape: tuple[int, ...]
    element_size: int
    kind: Hashable
    sparse: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def nbytes(self) -> int:
        """Size of the dense gradient in bytes."""
        return self.numel * self.element_size


@dataclass(frozen=True)
class BucketCaps:
    """When a bucket is full, in bytes.

    Attributes:
        limits: caps of the buckets of one kind in launch order; the last entry holds for all that follow.
            With 0 every parameter has a bucket of its own.
        last: cap of the very last bucket, or None to leave it as it comes.
    """

    limits: tuple[int, ...] = (MIB, 25 * MIB)
    last: int | None = MIB

    @classmethod
    def from_megabytes(cls, cap_mb: float | None, cap_mb_list: Sequence[float] | None = None) -> BucketCaps:
        """Caps from the units of ``bucket_cap_mb`` (MiB); None means the defaults."""
        if cap_mb_list:
            rest = [] if cap_mb is None else [cap_mb]
            return cls(tuple(int(mb * MIB) for mb in [*cap_mb_list, *rest]), last=None)
        if cap_mb is None:
            return cls()
        return cls((int(cap_mb * MIB),), last=None)

    def limit(self, position: int) -> int:
        """Cap in bytes of the bucket at this position among those of its kind."""
        return self.limits[min(position, len(self.limits) - 1)]


@dataclass(frozen=True)
class BucketPlan:
    """Parameter indices of each bucket, in launch order.

    Attributes:
        buckets: one tuple of parameter indices per bucket.
        fingerprint: a number below 2**20 that differs, very likely, between different plans.
    """

    buckets: tuple[tuple[int, ...], ...]
    fingerprint: int


def plan_buckets(
    specs: Sequence[ParameterSpec],
    order: Sequence[int],
    caps: BucketCaps,
    trailing: Set[int] = frozenset(),
) -> BucketPlan:
    """Fill buckets with parameters in the order in which their gradients arrive.

    Args:
        specs: all parameters.
        order: a permutation of their indices, first arrival first.
        caps: bucket sizes.
        trailing: parameters that are often unused; they go to buckets behind all others, so that
            waiting for them holds up nobody else.

    Returns:
        The plan. Buckets are ordered by the arrival of their last parameter, that is, by when
        they can be launched.
    """
    regular = [index for index in order if index not in trailing]
    late = [index for index in order if index in trailing]
    place = {index: position for position, index in enumerate(regular + late)}

    def launchable(bucket: Sequence[int]) -> int:
        return place[bucket[-1]]

    buckets = sorted(_fill(specs, regular, caps) + _fill(specs, late, caps), key=launchable)
    if caps.last is not None and buckets:
        buckets[-1:] = _split_last(specs, buckets[-1], caps.last)
        buckets.sort(key=launchable)
    frozen = tuple(tuple(bucket) for bucket in buckets)
    return BucketPlan(frozen, _fingerprint(specs, frozen))


def registration_order(count: int) -> list[int]:
    """The first guess at the order of arrival: backward visits modules last to first."""
    return list(range(count - 1, -1, -1))


def _fill(specs: Sequence[ParameterSpec], order: Sequence[int], caps: BucketCaps) -> list[list[int]]:
    open_buckets: dict[Hashable, list[int]] = {}
    open_bytes: dict[Hashable, int] = {}
    closed_count: dict[Hashable, int] = {}
    full: list[list[int]] = []
    for index in order:
        spec = specs[index]
        if spec.sparse:
            full.append([index])
            continue
        bucket = open_buckets.setdefault(spec.kind, [])
        bucket.append(index)
        open_bytes[spec.kind] = open_bytes.get(spec.kind, 0) + spec.nbytes
        position = closed_count.get(spec.kind, 0)
        if open_bytes[spec.kind] >= caps.limit(position):
            full.append(open_buckets.pop(spec.kind))
            open_bytes[spec.kind] = 0
            closed_count[spec.kind] = position + 1
    return full + list(open_buckets.values())


def _split_last(specs: Sequence[ParameterSpec], bucket: list[int], cap: int) -> list[list[int]]:
    """Cut the bucket so that what comes last is at most ``cap`` bytes, or one parameter."""
    size, cut = 0, len(bucket)
    while cut > 0 and (size == 0 or size + specs[bucket[cut - 1]].nbytes <= cap):
        cut -= 1
        size += specs[bucket[cut]].nbytes
    return [part for part in (bucket[:cut], bucket[cut:]) if part]


def _fingerprint(specs: Sequence[ParameterSpec], buckets: tuple[tuple[int, ...], ...]) -> int:
    described = repr([[(specs[i].name, specs[i].shape, str(specs[i].kind)) for i in b] for b in buckets])
    return zlib.crc32(described.encode()) % FINGERPRINT_MODULUS
