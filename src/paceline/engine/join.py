"""Uneven inputs: ranks that have run out of data shadow the collectives of the others.

``torch.distributed.algorithms.Join`` drives this. In each iteration it first counts, with a
collective of its own, the ranks that still have data; a rank that has none then runs
``main_hook`` here, which must issue what the others' forward and backward issue, in the
same order: agree on a source and broadcast buffers, say whether backward synchronises,
and reduce every bucket with zeros.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook

from paceline.comm.coalesced import broadcast_tensors

if TYPE_CHECKING:
    from paceline.engine.ddp import DistributedDataParallel


class WrapperJoinHook(JoinHook):
    """Shadows one wrapper.

    Args:
        wrapper: the DistributedDataParallel that takes part.
        divide_by_initial_world_size: divide sums by the number of all ranks, or else by the
            number of ranks that still have data.
    """

    def __init__(self, wrapper: DistributedDataParallel, divide_by_initial_world_size: bool) -> None:
        super().__init__()
        self._wrapper = wrapper
        self._shadowed = False
        wrapper.reducer.divide_by_active = not divide_by_initial_world_size
        wrapper.reducer.statistics.uneven_inputs = True

    def main_hook(self) -> None:
        """One iteration of the others, with nothing to contribute."""
        wrapper = self._wrapper
        wrapper.reducer.prepare_for_forward(training=False)
        wrapper.buffer_sync.joining = True
        synchronise_buffers(wrapper, has_data=False)
        if agree_to_synchronise(wrapper, has_data=False):
            self._shadowed = True
            wrapper.reducer.shadow_pass()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have run out: take the model of a rank that trained to the end."""
        wrapper = self._wrapper
        source = common_rank(wrapper, is_last_joiner)
        what = "broadcast of parameters at the end of join"
        broadcast_tensors(wrapper.replicated_parameters(), wrapper.peers, lambda: what, source)
        if wrapper.buffer_sync.enabled:
            wrapper.buffer_sync.broadcast(source)
        wrapper._authoritative_rank = source
        if self._shadowed:
            wrapper.reducer.drop_gradients()  # they belong to steps of others
        wrapper.reducer.divide_by_active = False
        wrapper.reducer.count_forwards_anew()


def synchronise_buffers(wrapper: DistributedDataParallel, has_data: bool) -> None:
    """Broadcast buffers, if due, from a rank that still has data."""
    if wrapper.buffer_sync.take_turn(wrapper.reducer.passes_finished):
        wrapper.buffer_sync.broadcast(common_rank(wrapper, has_data))


def agree_to_synchronise(wrapper: DistributedDataParallel, has_data: bool) -> bool:
    """Whether the backward of this iteration synchronises on the ranks that have data."""
    answer = torch.tensor([float(has_data and wrapper.require_backward_grad_sync)], device=wrapper.device)
    _reduce(wrapper, answer, dist.ReduceOp.SUM, "whether this iteration of join synchronises")
    return bool(answer.item())


def common_rank(wrapper: DistributedDataParallel, eligible: bool) -> int:
    """The highest rank of those that say they are eligible; the same on every rank."""
    candidate = torch.tensor([wrapper.peers.rank if eligible else -1], device=wrapper.device)
    _reduce(wrapper, candidate, dist.ReduceOp.MAX, "which rank others follow in join")
    return int(candidate.item())


def _reduce(wrapper: DistributedDataParallel, value: Tensor, op: dist.ReduceOp.RedOpType, what: str) -> None:
    """All-reduce ``value`` in place, over the wrapper's ranks."""
    number = wrapper.reducer.passes_finished + 1
    begin = partial(dist.all_reduce, value, op=op, group=wrapper.process_group, async_op=True)
    wrapper.peers.run(begin, value.device, lambda: f"forward before backward pass {number}, {what}")
