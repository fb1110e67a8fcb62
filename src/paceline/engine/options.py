"""What the user of a wrapper decided, as far as the reducer needs it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from paceline.comm.coalesced import gather_objects
from paceline.comm.waiting import Peers
from paceline.engine.plan import BucketCaps

# Attributes of a wrapper that decide which collectives are issued, and of what size.
_DECIDED_BY_RANK_0 = (
    "bucket_cap_mb",
    "bucket_cap_mb_list",
    "find_unused_parameters",
    "static_graph",
    "skip_all_reduce_unused_params",
    "delayed_parameters",
    "forward_sync_buffers",
    "verify_replicas_every",
)


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


def follow_rank_0(wrapper: Any, peers: Peers) -> None:
    """Give ``wrapper`` the options that it has on rank 0, with a warning if they were others.

    As torch's class does with bucket sizes. Every rank must call it.

    Args:
        wrapper: has the options as attributes.
        peers: the ranks.
    """
    mine = {name: getattr(wrapper, name) for name in _DECIDED_BY_RANK_0}
    rank_0s = gather_objects(mine, peers, lambda: "construction of the wrapper, comparison of its options")[0]
    for name, value in rank_0s.items():
        if value != mine[name]:
            warnings.warn(
                f"rank {peers.global_rank}: {name} is {mine[name]!r} here and {value!r} on rank "
                f"{peers.in_job([0])[0]}, whose options hold on all ranks; write the same on all of them",
                stacklevel=3,
            )
            setattr(wrapper, name, value)
