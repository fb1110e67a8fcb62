"""What a rank asks of the shared-memory kernel, and the words for it when it fails."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.native import Call, Failure, Kind, Status
from paceline.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    CommunicationError,
    PeerLostError,
    RanksOutOfStepError,
)

BYTES = 5  # the kernel's type for what is only copied: PL_U8

# `enum pl_type` in csrc/shm.h.
TYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int16: 6,
    torch.uint16: 7,
    torch.int32: 8,
    torch.uint32: 9,
    torch.int64: 10,
    torch.uint64: 11,
    torch.bool: 12,
}

# In the order of `enum pl_reduction`.
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
_BITWISE = (5, 6, 7)
_PREMUL_SUM = 8

# What is carried out by Gloo, after the ranks compared their calls here.
ELSEWHERE = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_single",
    "reduce_scatter",
    "reduce_scatter_single",
    "all_to_all_single",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
)


def label_of(dtype: torch.dtype) -> int:
    """A number for any dtype, equal on all ranks, so that they can compare what the kernel only copies."""
    return _labels()[dtype]


def reduction_of(op: Any, dtype: torch.dtype) -> tuple[int, float] | None:
    """The kernel's number for a ``ReduceOp`` and what inputs are multiplied by; None: not in the kernel.

    Raises:
        ArgumentError: nobody can reduce elements of this dtype, the Gloo group inside neither.
    """
    if dtype not in TYPES:
        raise ArgumentError(
            f"ranks cannot reduce {dtype}: convert the tensor before, for example to torch.bfloat16"
        )
    if op == dist.ReduceOp.SUM:  # nearly always; what follows takes longer than a small reduction
        return 0, 1.0
    state = op.__getstate__()  # the only way to a PREMUL_SUM's factor
    kind, supplement = state if isinstance(state, tuple) else (op, None)
    number = _numbers().get(kind)
    if number is None or (number in _BITWISE and dtype.is_floating_point):
        return None
    if number != _PREMUL_SUM:
        return number, 1.0
    factor = supplement.item() if isinstance(supplement, torch.Tensor) else supplement
    return number, float(factor)


def in_words(call: Call) -> str:
    """For example ``all_reduce SUM of 1,024 x float32``."""
    kind = Kind(call.kind)
    dtype = list(_labels())[call.label]
    name = ELSEWHERE[call.detail] if kind is Kind.elsewhere else kind.name
    if name == "barrier":
        return name
    words, numel = name, call.count
    if kind in (Kind.all_reduce, Kind.reduce, Kind.reduce_scatter) or call.reduction:
        words += f" {REDUCTIONS[call.reduction]}"
    elif kind is not Kind.elsewhere:
        numel //= dtype.itemsize
    words += f" of {numel:,} x" if numel or kind is not Kind.elsewhere else " of"
    words += f" {str(dtype).removeprefix('torch.')}"
    if name in ("reduce", "gather"):
        words += f" to rank {call.root}"
    if name in ("broadcast", "scatter"):
        words += f" from rank {call.root}"
    return words


def error_for(
    failure: Failure, call: Call, number: int, ranks: list[int], local_rank: int, timeout_s: float
) -> CommunicationError:
    """The exception for a collective that failed.

    Args:
        failure: what the kernel says.
        call: what this rank called.
        number: which collective of the group it was.
        ranks: the global rank of each of the kernel's ranks.
        local_rank: this rank among them.
        timeout_s: how long ranks had to come.
    """
    kind, reason = _kind_and_reason(failure, ranks, local_rank, timeout_s)
    error = kind(f"rank {ranks[local_rank]}: collective {number} ({in_words(call)}) failed, because {reason}")
    error.reason = reason
    error.ranks = tuple(ranks[rank] for rank in failure.culprits)
    return error


def _kind_and_reason(
    failure: Failure, ranks: list[int], local_rank: int, timeout_s: float
) -> tuple[type[CommunicationError], str]:
    culprits = [rank for rank in failure.culprits if rank != local_rank]
    named = ", ".join(f"rank {ranks[rank]}" for rank in culprits) or "a rank"
    if failure.status is Status.MISMATCH:
        return RanksOutOfStepError, (
            f"the ranks made different calls: {_calls_in_words(failure.calls, ranks)}. Nothing was moved. "
            "All ranks must make the same calls in the same order"
        )
    if failure.status is Status.LOST:
        return PeerLostError, (
            f"the process of {named} is gone, or has left the process group; look for the first error in its "
            "output"
        )
    if failure.status is Status.TIMED_OUT and local_rank in failure.culprits:
        return CollectiveTimeoutError, (
            f"this rank came too late: another one had given up after waiting {timeout_s:g} s"
        )
    if failure.status is Status.TIMED_OUT:
        return CollectiveTimeoutError, (
            f"{named} did not come before the timeout of {timeout_s:g} s: stuck, stopped, slower than the "
            "process group's timeout, or out of data while others still have some"
        )
    if failure.status is Status.FORKED:
        return CommunicationError, "a forked process cannot use its parent's process group"
    return CommunicationError, "the process group was shut down meanwhile"


def _calls_in_words(calls: list[Call], ranks: list[int]) -> str:
    callers: dict[str, list[int]] = {}
    for rank, call in zip(ranks, calls, strict=True):
        callers.setdefault(in_words(call), []).append(rank)
    return "; ".join(
        f"{'ranks' if len(who) > 1 else 'rank'} {', '.join(map(str, who))} called {words}"
        for words, who in callers.items()
    )


@functools.cache
def _numbers() -> dict[Any, int]:
    return {getattr(dist.ReduceOp, name): number for number, name in enumerate(REDUCTIONS)}


@functools.cache
def _labels() -> dict[torch.dtype, int]:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {dtype: index for index, dtype in enumerate(sorted(dtypes, key=str))}
