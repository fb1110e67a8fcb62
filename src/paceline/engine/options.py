"""What the user of a wrapper decided, as far as the reducer needs it."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.engine.plan import BucketCaps


@dataclass(frozen=True)
class ReducerOptions:
    """What the user decided.

    Attributes:
        caps: bucket sizes.
        find_unused_parameters: whether a step may leave parameters without gradient.
        static_graph: whether every step must use the same parameters equally often.
        keep_shared: whether a gradient that the user kept across ``zero_grad`` stays as it was.
        eager: whether gradients move and buckets are launched while backward goes on. Not with
            low-precision copies, whose gradients have another dtype until backward has ended.
        skip_unused: whether buckets of parameters that no rank used are left out of the pass.
        delayed: names of parameters that travel behind all others.
    """

    caps: BucketCaps
    find_unused_parameters: bool = False
    static_graph: bool = False
    keep_shared: bool = True
    eager: bool = True
    skip_unused: bool = False
    delayed: frozenset[str] = frozenset()
