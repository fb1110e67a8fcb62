"""The ``shm`` process group: ranks of one host move tensors through memory they share.

    import paceline
    torch.distributed.init_process_group("shm")

It is a ``torch.distributed.ProcessGroup``, so torch's own DDP, FSDP and Accelerate run on it
as well. Collectives that the kernel has (all_reduce, reduce, broadcast, all_gather,
reduce_scatter, all_to_all of equal parts, barrier) go there; every other one goes to the Gloo
group inside, after the ranks compared their calls. Gloo also serves all of them where ranks cannot
share memory.

A call that does not ask for ``async_op`` is carried out in the calling thread, as far as the other
ranks are there; any other one by a thread of the kernel, or by whoever waits for it earlier.

A tensor from ``allocate_tensor`` lies where the other ranks can read it and is reduced in
place; any other is copied through in pieces. Results do not depend on which it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import hosts
from paceline.comm.call_forms import (
    broadcast_options_of,
    copy_all,
    copy_back,
    flat_of,
    is_plain,
    listed,
    new_options,
    options_of,
    root_of,
    unrolled,
    unshared,
)
from paceline.comm.calls import BYTES, reduction_of
from paceline.comm.interpreted import interpreted
from paceline.comm.local import SharedMemory, copy_call, reduce_call
from paceline.comm.native import Call, Kind
from paceline.comm.quick_sums import QuickSums
from paceline.comm.several_hosts import SeveralHosts
from paceline.comm.through_gloo import ComparedCalls, GroupOverGloo
from paceline.comm.work import Worker, joined

logger = logging.getLogger("paceline")


@interpreted
class SharedMemoryGroup(GroupOverGloo):
    """A process group whose ranks share memory.

    Args:
        store: shared by exactly these ranks.
        rank: this rank in the group.
        size: number of ranks.
        timeout: how long a collective waits for the others.
        global_ranks: the ranks' numbers in the whole job.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, global_ranks: Sequence[int]
    ) -> None:
        super().__init__(store, rank, size, timeout)
        self._store, self._splits = store, 0
        self._global_ranks = list(global_ranks) or list(range(size))
        self._memory: SharedMemory | None = None  # of all ranks
        self._quick: QuickSums | None = None
        self._hosts: SeveralHosts | None = None
        layout, reason = hosts.same_host(store, rank, size), None
        joined = hosts.join(store, layout)
        reason = hosts.all_agree(store, rank, size, joined if isinstance(joined, str) else None)
        if rank == 0:
            logger.info("shm: %s", layout.in_words() if reason is None else f"Gloo serves, because {reason}")
        if isinstance(joined, str):
            return
        if reason is not None:
            joined.disconnect()
            return
        memory = SharedMemory(joined, [self._global_ranks[r] for r in layout.neighbours])
        if len(layout.hosts) == 1:
            self._memory = memory
            if not self._recorder.path:  # the short way records nothing
                self._quick = QuickSums(memory, self._timeout)
            self._compared = ComparedCalls(Worker("paceline-gloo"), memory.compare)
        else:
            self._hosts = over = SeveralHosts(memory, layout, store, timeout)
            self._compared = ComparedCalls(over.worker, lambda *call: partial(over.compare, *call))
        self._inner.arena = memory.arena

    # -- memory ---------------------------------------------------------------------------------

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether ``allocate_tensor`` serves this device."""
        return self._inner.supports_tensor_alloc(device)

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A 1-d tensor of zeros that collectives of this group work on in place.

        Args:
            size: number of elements.
            dtype: any dtype.
            device: the CPU.

        Raises:
            MemoryError: there is not that much memory.
        """
        return self._inner.allocate_tensor(size, dtype=dtype, device=device)

    # -- collectives of the kernel ----------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Reduce tensors over all ranks, in place, on all of them."""
        if type(tensors) is list and len(tensors) == 1 and type(opts) is dist.AllreduceOptions:
            quick = self._quick and self._quick.all_reduce(tensors[0], opts)
            return quick or self._all_reduce(tensors[0], opts)
        tensors, opts = listed(tensors), options_of(dist.AllreduceOptions, opts, timeout)
        return joined([self._all_reduce(tensor, opts) for tensor in tensors])

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce several tensors over all ranks, in place."""
        return self.allreduce(tensors, opts or dist.AllreduceOptions())

    def reduce(self, tensors: Any, opts: Any = None, *more: Any) -> dist.Work:
        """Reduce a tensor over all ranks into that of the root; the others' tensors stay as they are."""
        if not isinstance(opts, dist.ReduceOptions):
            return self._gloo.reduce(tensors, opts, *more)
        (tensor,) = tensors
        root = root_of(opts, self.size())
        return self._reduce(Kind.reduce, tensor, opts, root) or self._through_gloo(
            "reduce", tensor, tensor.numel(), root, opts, lambda: self._gloo.reduce(tensors, opts), tensors
        )

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Copy the root's tensor into all ranks' tensors."""
        (tensor,) = tensors = listed(tensors)
        opts = broadcast_options_of(opts)
        root = root_of(opts, self.size())
        if self._hosts is not None and is_plain(tensor) and tensor.numel():
            work = self._hosts.broadcast(tensor, root, self._timeout_of(opts))
            return self._noted("broadcast", tensor, work)
        if not self._serves(tensor):
            begin = partial(self._gloo.broadcast, tensors, opts)
            return self._through_gloo("broadcast", tensor, tensor.numel(), root, opts, begin, tensors)
        flat = flat_of(tensor)
        call = copy_call(Kind.broadcast, tensor.dtype, tensor.nbytes, root)
        return self._start(call, flat, flat, opts, [tensor], copy_back(tensor, flat))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Gather every rank's tensor, one after the other, into one tensor on all ranks."""
        opts = opts or new_options("AllgatherOptions")
        whole = output.numel() == input.numel() * self.size() and output.dtype == input.dtype
        if self._hosts is not None and whole and input.numel() and is_plain(output) and is_plain(input):
            work = self._hosts.all_gather_single(output, input, self._timeout_of(opts))
            return self._noted("all_gather_single", input, work)
        if not self._serves(output, input) or not whole:
            begin = partial(self._gloo.all_gather_single, unrolled(output), unrolled(input), opts)
            return self._through_gloo("all_gather_single", input, 0, 0, opts, begin, [output])
        target = flat_of(output)
        source = unshared(flat_of(input), target, self.rank() * input.nbytes)
        call = copy_call(Kind.all_gather, input.dtype, input.nbytes)
        return self._start(call, source, target, opts, [output], copy_back(output, target))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Gather every rank's tensor into a list of tensors on all ranks."""
        targets, source = (outputs, inputs) if isinstance(inputs, Tensor) else (outputs[0], inputs[0])
        opts = opts or new_options("AllgatherOptions")
        alike = all(t.shape == source.shape and t.dtype == source.dtype for t in targets)
        if not self._serves(source, *targets) or not alike or len(targets) != self.size():
            begin = partial(self._gloo.allgather, outputs, inputs, opts)
            return self._through_gloo("all_gather", source, 0, 0, opts, begin, targets)
        gathered = source.new_empty((len(targets), *source.shape))
        call = copy_call(Kind.all_gather, source.dtype, source.nbytes)
        finish = partial(copy_all, targets, gathered)
        return self._start(call, flat_of(source), gathered, opts, targets, finish)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Reduce a tensor over all ranks and give each its part."""
        opts = opts or new_options("ReduceScatterOptions")
        work = None
        if input.numel() == output.numel() * self.size():
            work = self._reduce_scatter(output, input, opts)
        begin = partial(self._gloo.reduce_scatter_single, unrolled(output), unrolled(input), opts)
        return work or self._through_gloo("reduce_scatter_single", input, 0, 0, opts, begin, [output])

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> dist.Work:
        """Reduce a list of tensors over all ranks and give each one of them."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = options_of(partial(new_options, "ReduceScatterOptions"), opts, *more)
        (output,), (sources,) = outputs, inputs
        work = None
        if all(t.shape == output.shape and t.dtype == output.dtype for t in sources):
            work = self._reduce_scatter(output, torch.stack(list(sources)), opts)
        begin = partial(self._gloo.reduce_scatter, outputs, inputs, opts)
        return work or self._through_gloo("reduce_scatter", output, 0, 0, opts, begin, outputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_split_sizes: Any, input_split_sizes: Any, opts: Any = None
    ) -> dist.Work:
        """Send part r of the input to rank r; receive rank r's part as part r of the output."""
        opts = opts or dist.AllToAllOptions()
        equal = not output_split_sizes and not input_split_sizes and input.numel() % self.size() == 0
        if not equal or not self._serves(output, input) or output.numel() != input.numel():
            splits = (output_split_sizes, input_split_sizes)
            begin = partial(self._gloo.all_to_all_single, output, input, *splits, opts)
            return self._through_gloo("all_to_all_single", input, 0, 0, opts, begin, [output])
        target = flat_of(output)
        source = unshared(flat_of(input), target)
        call = copy_call(Kind.all_to_all, input.dtype, input.nbytes // self.size())
        return self._start(call, source, target, opts, [output], copy_back(output, target))

    def barrier(  # type: ignore[override]
        self, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Wait until all ranks are here."""
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        opts = options_of(dist.BarrierOptions, opts, timeout)
        if self._memory is None:
            begin = partial(self._gloo.barrier, opts)
            return self._through_gloo(
                "barrier", torch.empty(0, dtype=torch.uint8, device="cpu"), 0, 0, opts, begin, []
            )
        call = Call(Kind.barrier, 0, BYTES, 0, 0, 0, 0, 0, 1.0)
        return self._start(call, None, None, opts, [], None)

    # Several tensors at once, and the names under which older callers know some of the above.

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """``all_gather_single`` of several tensors."""
        return joined([self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """``reduce_scatter_single`` of several tensors."""
        return joined([self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    # -- other groups -------------------------------------------------------------------------------

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> SharedMemoryGroup | None:
        """A group of some of these ranks; all of them have to call, each with the ranks of its own part.

        Args:
            ranks: numbers of ranks in this group.
            timeout: of the new group; the default is this one's.
            opts: unused, as there are none for this backend.
            group_name: of the new group.
            group_desc: of the new group.
            device_types: unused, as the new group serves what this one does.

        Returns:
            The group, or None on a rank that is not among ``ranks``.
        """
        self._splits += 1
        members = sorted(ranks)
        if self.rank() not in members:
            return None
        store = dist.PrefixStore(f"split/{self._splits}/{members[0]}", self._store)
        timeout = timeout or timedelta(seconds=self._timeout.seconds)
        global_ranks = [self._global_ranks[rank] for rank in members]
        group = SharedMemoryGroup(store, members.index(self.rank()), len(members), timeout, global_ranks)
        name = group_name or f"{self.group_name}/split/{self._splits}/{members[0]}"
        group._set_group_name(name)  # type: ignore[arg-type]  # its NewType is private
        group._set_group_desc(group_desc or "undefined")
        return group

    # -- life ---------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leave the group."""
        self._leave()
        super().shutdown()

    def abort(self) -> None:
        """Leave the group; what is in flight fails."""
        self._leave()
        super().abort()

    # -- below ----------------------------------------------------------------------------------------

    def _leave(self) -> None:
        if self._compared is not None:
            self._compared.stop()
        if self._memory is not None:
            self._memory.close()  # what is in flight fails, so that nobody waits for it any more
        if self._hosts is not None:
            self._hosts.close()
        if self._compared is not None:
            self._compared.join()

    def _serves(self, *tensors: Tensor) -> bool:
        return self._memory is not None and all(map(is_plain, tensors))

    def _start(
        self,
        call: Call,
        source: Tensor | None,
        target: Tensor | None,
        opts: Any,
        results: Sequence[Tensor],
        finish: Callable[[], Any] | None,
    ) -> dist.Work:
        assert self._memory is not None
        if self._recorder.path:
            self._note(Kind(call.kind).name, 0 if source is None else source.nbytes)
        if opts.asyncOp:
            return self._memory.start(call, source, target, self._timeout_of(opts), results, finish)
        with self._recorder.waiting:
            return self._memory.run(call, source, target, self._timeout_of(opts), finish)

    def _all_reduce(self, tensor: Tensor, opts: Any) -> dist.Work:
        if self._hosts is not None:
            work = self._all_reduce_over_hosts(self._hosts, tensor, opts)
        else:
            work = self._reduce(Kind.all_reduce, tensor, opts, root=0)
        if work is not None:
            return work
        begin = partial(self._gloo.allreduce, [tensor], opts)
        return self._through_gloo("all_reduce", tensor, tensor.numel(), 0, opts, begin, [tensor])

    def _all_reduce_over_hosts(self, hosts: SeveralHosts, tensor: Tensor, opts: Any) -> dist.Work | None:
        if not is_plain(tensor):
            return None
        wire = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        work = hosts.all_reduce(wire, opts.reduceOp, self._timeout_of(opts))
        return work and self._noted("all_reduce", tensor, work)

    def _noted(self, kind: str, tensor: Tensor, work: dist.Work) -> dist.Work:
        """Record a call over several hosts that was started."""
        self._note(kind, tensor.nbytes)
        return work

    def _reduce(self, kind: Kind, tensor: Tensor, opts: Any, root: int) -> dist.Work | None:
        """None when the kernel does not do it."""
        if self._memory is None or not is_plain(tensor):
            return None
        wire = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        reduction = reduction_of(opts.reduceOp, wire.dtype)
        if reduction is None:
            return None
        flat = flat_of(wire)
        call = reduce_call(kind, tensor.dtype, wire.dtype, reduction, wire.numel(), root)
        returns = flat is not wire and (kind is Kind.all_reduce or root == self.rank())
        return self._start(call, flat, flat, opts, [tensor], copy_back(wire, flat) if returns else None)

    def _reduce_scatter(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work | None:
        if not is_plain(output) or not is_plain(input) or output.dtype != input.dtype:
            return None
        if self._hosts is not None and output.numel() and not output.is_complex():
            timeout_s = self._timeout_of(opts)
            work = self._hosts.reduce_scatter_single(output, input, opts.reduceOp, timeout_s)
            return work and self._noted("reduce_scatter_single", input, work)
        if self._memory is None:
            return None
        sources, results = (torch.view_as_real(t) if t.is_complex() else t for t in (input, output))
        reduction = reduction_of(opts.reduceOp, results.dtype)
        if reduction is None:
            return None
        target = flat_of(results)
        source = unshared(flat_of(sources), target, -self.rank() * target.nbytes)
        call = reduce_call(Kind.reduce_scatter, output.dtype, results.dtype, reduction, results.numel(), 0)
        return self._start(call, source, target, opts, [output], copy_back(results, target))


def create_group(options: Any, _: Any) -> dist.ProcessGroup:
    """What torch.distributed calls for backend "shm"."""
    ranks = options.global_ranks_in_group
    return SharedMemoryGroup(options.store, options.group_rank, options.group_size, options.timeout, ranks)
