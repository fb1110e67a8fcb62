"""Collectives over several hosts. An all-reduce takes four steps:

    compare    the ranks of each host hold their calls against each other, and the hosts theirs
    inside     all ranks of the host reduce into their tensors
    between    the first ranks of each host, as many as the smallest host has, reduce one slice each with
               their counterparts on the other hosts, so that all of them drive the network
    inside     each of these hands its slice to the others of its host

Broadcast, all-gather and reduce-scatter take the same way, so that nothing crosses the network twice in one
direction: the last one reduces inside each host, and of these sums sends every host its ranks' parts alone.
All other collectives go through Gloo over all ranks once the calls were compared. They share one thread,
so that every rank takes all steps in the same order.

A rank's result comes from the same additions as everybody else's, so all are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.between_hosts import LONGER_S, BetweenHosts
from paceline.comm.call_forms import bytes_of, copy_all, flat_of
from paceline.comm.calls import REDUCTIONS, in_words, reduction_of
from paceline.comm.hosts import Layout
from paceline.comm.local import SharedMemory, elsewhere_call
from paceline.comm.native import Call
from paceline.comm.work import KeptWorks, TaskWork, Worker
from paceline.errors import CollectiveTimeoutError, CommunicationError, PeerLostError, RanksOutOfStepError

_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
_DISAGREE = -1  # in the place of a call's kind
_OPS = ("SUM", "AVG", "PREMUL_SUM", "PRODUCT", "MIN", "MAX")


class SeveralHosts:
    """The ranks of a group that lie on several hosts.

    Args:
        memory: what the ranks of this host share.
        layout: which rank is where.
        store: shared by exactly the ranks of the group.
        timeout: how long a host waits for the others.
    """

    def __init__(self, memory: SharedMemory, layout: Layout, store: dist.Store, timeout: timedelta) -> None:
        self.memory = memory
        self._layout = layout
        self._size = sum(map(len, layout.hosts))
        self._drivers = min(map(len, layout.hosts))
        self._driver = layout.neighbours.index(layout.rank)
        self.worker, self._kept = Worker("paceline-hosts"), KeptWorks()
        me = memory.global_ranks[self._driver]
        self._between = BetweenHosts(store, layout, self._driver, self._drivers, timeout, me)
        self._torn: CommunicationError | None = None  # why every later call fails

    def all_reduce(self, tensor: Tensor, op: Any, timeout_s: float) -> dist.Work | None:
        """Start reducing a CPU tensor over all ranks, in place; None when only Gloo can.

        Args:
            tensor: strided, any real dtype but bool.
            op: what to do; the result is what one host with all ranks would give, to rounding.
            timeout_s: how long the ranks of this host may take.
        """
        known = _reduction_between_hosts(op, tensor.dtype)
        if known is None:
            return None
        name, factor, number = known
        call = elsewhere_call("all_reduce", tensor, tensor.numel(), 0, number)
        return self._start(self._steps(call, tensor, name, factor, timeout_s), [tensor])

    def broadcast(self, tensor: Tensor, root: int, timeout_s: float) -> dist.Work:
        """Start copying the root's CPU tensor into all ranks'.

        Args:
            tensor: strided, not empty.
            root: a rank of the group.
            timeout_s: how long the ranks of this host may take.
        """
        call = elsewhere_call("broadcast", tensor, tensor.numel(), root)

        def carry_out() -> None:
            self._compare(call, timeout_s)
            flat = flat_of(tensor)
            data, home = bytes_of(flat), self._layout.host_of(root)
            if home == self._layout.host:
                self.memory.broadcast(data, self._layout.neighbours.index(root), timeout_s)
            self._share([data], [home], timeout_s)
            if flat is not tensor:
                tensor.copy_(flat)

        return self._start(carry_out, [tensor])

    def all_gather_single(self, output: Tensor, input: Tensor, timeout_s: float) -> dist.Work:
        """Start gathering every rank's CPU tensor, one after the other, into one tensor on all ranks.

        Args:
            output: strided, with the elements of all ranks.
            input: strided, of the same dtype, not empty.
            timeout_s: how long the ranks of this host may take.
        """
        call = elsewhere_call("all_gather_single", input, input.numel(), 0)

        def carry_out() -> None:
            self._compare(call, timeout_s)
            flat = flat_of(output)
            source, rows = bytes_of(flat_of(input)), bytes_of(flat).view(self._size, -1)
            blocks = [source.new_empty(len(ranks), rows.shape[1]) for ranks in self._layout.hosts]
            self.memory.all_gather(source, blocks[self._layout.host], timeout_s)
            self._share(blocks, range(len(blocks)), timeout_s)
            for ranks, block in zip(self._layout.hosts, blocks, strict=True):
                copy_all([rows[rank] for rank in ranks], block)
            if flat is not output:
                output.copy_(flat)

        return self._start(carry_out, [output])

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, op: Any, timeout_s: float
    ) -> dist.Work | None:
        """Start reducing a CPU tensor over all ranks, each of which gets its part; None when only Gloo can.

        Args:
            output: strided, not empty, any real dtype but bool.
            input: strided, of the same dtype, with as many elements as the outputs of all ranks.
            op: what to do.
            timeout_s: how long the ranks of this host may take.
        """
        known = _reduction_between_hosts(op, output.dtype)
        if known is None:
            return None
        name, factor, number = known
        call = elsewhere_call("reduce_scatter_single", input, input.numel(), 0, number)

        def carry_out() -> None:
            self._compare(call, timeout_s)
            sums = input.to(_WIDE.get(input.dtype, input.dtype), copy=True).contiguous()
            if name == "PREMUL_SUM":
                sums.mul_(factor)
            fold = _fold_of(name)
            self.memory.all_reduce(sums.view(-1), fold, timeout_s)
            mine = self._parts_of_this_host(sums.view(self._size, -1), fold, timeout_s)[self._driver]
            self._average(mine, name)
            output.copy_(mine.view(output.shape))

        return self._start(carry_out, [output])

    def compare(self, call: Call, timeout_s: float) -> None:
        """Hold this rank's call against everybody's; in the order of calls, by the worker.

        Raises:
            RanksOutOfStepError: on all ranks, unless all called the same.
        """
        self._unless_torn(lambda: self._compare(call, timeout_s))

    def _compare(self, call: Call, timeout_s: float) -> None:
        facts = [call.kind, call.reduction, call.label, call.root, call.detail, call.count]
        mine = torch.tensor(facts, dtype=torch.int64, device="cpu")
        differ_here: RanksOutOfStepError | None = None
        try:
            self.memory.run(call, None, None, timeout_s)
        except RanksOutOfStepError as error:  # the other hosts wait to hear of it
            differ_here, mine[0] = error, _DISAGREE
        everybodys = [torch.zeros_like(mine) for _ in self._layout.hosts]
        if self._driver == 0:
            self._between.wait(self._between.gloo.allgather([everybodys], [mine]))
        table = torch.stack(everybodys)
        self.memory.broadcast(table, 0, timeout_s + 2 * LONGER_S)
        if differ_here is not None:
            raise differ_here
        if not torch.equal(table, mine.expand_as(table)):
            raise RanksOutOfStepError(self._differences(table.tolist()))

    def close(self) -> None:
        """Leave; nothing more is started."""
        self.worker.stop()
        self.memory.close()
        self.worker.join()

    def _differences(self, table: list[list[int]]) -> str:
        said = []
        for ranks, (kind, reduction, label, root, detail, count) in zip(
            self._layout.hosts, table, strict=True
        ):
            who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            call = Call(abs(kind), reduction, 0, label, root, detail, count, 0, 1.0)
            said.append(f"{who} called {in_words(call)}" if kind != _DISAGREE else f"{who} differ themselves")
        return (
            f"rank {self._layout.rank}: a collective failed, because the hosts made different calls: "
            f"{'; '.join(said)}. Nothing was moved. All ranks must make the same calls in the same order"
        )

    def _start(self, steps: Callable[[], None], results: list[Tensor]) -> dist.Work:
        work = TaskWork(self.worker, lambda: self._unless_torn(steps), results)
        self._kept.keep(work)
        return work

    def _unless_torn(self, steps: Callable[[], None]) -> None:
        """Take the steps of a collective; if that loses ranks, tell all others and leave.

        Raises:
            CollectiveTimeoutError: a rank of any host did not come in time; so does every later call.
            PeerLostError: the process of a rank is gone; so does every later call.
        """
        if self._torn is not None:
            raise self._torn
        try:
            steps()
        except (CollectiveTimeoutError, PeerLostError) as error:
            self._torn = self._between.told() or error
            self._between.tell(self._torn)
            self.memory.close()  # or those of this host would wait for this rank
            raise self._torn from error

    def _share(self, blocks: Sequence[Tensor], homes: Sequence[int], timeout_s: float) -> None:
        """Bring each block of bytes from all ranks of its home, one of the hosts, to those of the others."""
        parts = [block.view(-1).tensor_split(self._drivers) for block in blocks]
        if self._between.gloo is not None:
            works = []
            for part, home in zip(parts, homes, strict=True):
                options = dist.BroadcastOptions()
                options.rootRank = home
                works.append(self._between.gloo.broadcast([part[self._driver]], options))
            for work in works:
                self._between.wait(work)
        for part, home in zip(parts, homes, strict=True):
            for driver, one in enumerate(part):
                if home != self._layout.host:
                    self.memory.broadcast(one, driver, timeout_s)

    def _steps(
        self, call: Call, tensor: Tensor, name: str, factor: float, timeout_s: float
    ) -> Callable[[], None]:
        def carry_out() -> None:
            self._compare(call, timeout_s)
            dtype = _WIDE.get(tensor.dtype, tensor.dtype)
            flat = (
                tensor if tensor.is_contiguous() and dtype == tensor.dtype else tensor.to(dtype).contiguous()
            )
            if name == "PREMUL_SUM":
                flat.mul_(factor)
            self._reduce(flat.view(-1), _fold_of(name), timeout_s)
            self._average(flat, name)
            if flat is not tensor:
                tensor.copy_(flat)

        return carry_out

    def _reduce(self, flat: Tensor, op: dist.ReduceOp, timeout_s: float) -> None:
        self.memory.all_reduce(flat, op, timeout_s)
        slices = flat.tensor_split(self._drivers)
        if self._between.gloo is not None:
            options = dist.AllreduceOptions()
            options.reduceOp = op
            self._between.wait(self._between.gloo.allreduce([slices[self._driver]], options))
        for driver, part in enumerate(slices):
            self.memory.broadcast(part, driver, timeout_s)

    def _parts_of_this_host(self, rows: Tensor, op: dist.ReduceOp, timeout_s: float) -> Tensor:
        """Of every host's sums, one row per rank of the group, the rows of this host's ranks, reduced."""
        blocks = [rows[list(ranks)] for ranks in self._layout.hosts]
        slices = [block.view(-1).tensor_split(self._drivers) for block in blocks]
        if self._between.gloo is not None:
            works = []
            for host, of_host in enumerate(slices):
                options = dist.ReduceOptions()
                options.reduceOp, options.rootRank = op, host
                works.append(self._between.gloo.reduce([of_host[self._driver]], options))
            for work in works:
                self._between.wait(work)
        for driver, part in enumerate(slices[self._layout.host]):
            self.memory.broadcast(part, driver, timeout_s)
        return blocks[self._layout.host]

    def _average(self, sums: Tensor, name: str) -> None:
        if name == "AVG":
            sums.div_(self._size) if sums.is_floating_point() else sums.floor_divide_(self._size)


def _reduction_between_hosts(op: Any, dtype: torch.dtype) -> tuple[str, float, int] | None:
    """The name of what to do, what inputs are multiplied by, and its number; None when only Gloo can."""
    known = reduction_of(op, dtype)
    if known is None or dtype is torch.bool or REDUCTIONS[known[0]] not in _OPS:
        return None
    number, factor = known
    return REDUCTIONS[number], factor, number


def _fold_of(name: str) -> dist.ReduceOp:
    """What hosts do with each other's results."""
    return dist.ReduceOp(getattr(dist.ReduceOp, name if name in ("PRODUCT", "MIN", "MAX") else "SUM"))
