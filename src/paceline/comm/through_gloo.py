"""The Gloo group inside an shm group: what it carries out, and what it stands for.

Gloo itself does not notice that ranks call different collectives: it waits, or mixes their bytes. So
ranks that share memory compare their calls before Gloo sees them.

Note "not through super()": what torch lets a Python class override, its C++ side calls with the
interpreter lock held, also when it ends up in the base class. There Gloo's thread may be
waiting for that lock, holding one that the call needs. So what goes to Gloo goes to a plain
group of torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.arena import Arena
from paceline.comm.call_forms import bytes_and_back, root_of
from paceline.comm.interpreted import interpreted
from paceline.comm.local import elsewhere_call
from paceline.comm.native import Call
from paceline.comm.work import CopiedWork, TaskWork, Worker
from paceline.recorder.layout import Kind as Fact
from paceline.recorder.ring import recorder

UNSET = timedelta(0)  # torch's options hold -1 ms where the group's own timeout counts


@dataclass
class GroupTimeout:
    """How long collectives that start from now on wait for the other ranks."""

    seconds: float


class InnerGloo(dist.ProcessGroupGloo):
    """The backend that torch finds when it asks an shm group for one; it speaks for the whole group.

    Args:
        store: shared by exactly these ranks.
        rank: this rank in the group.
        size: number of ranks.
        timeout: how long a collective waits for the others.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, timeout=timeout)
        self.group_timeout = GroupTimeout(timeout.total_seconds())
        self.arena: Arena | None = None  # set by the group once ranks share memory

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether ``allocate_tensor`` serves this device. FSDP2 asks here, if told to."""
        return self.arena is not None and torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As of the group."""
        assert self.arena is not None
        return self.arena.allocate(size, dtype)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        super()._set_default_timeout(timeout)
        self.group_timeout.seconds = timeout.total_seconds()


class ComparedCalls:
    """Runs Gloo's collectives in their order, each once all ranks have called the same.

    Args:
        worker: runs them.
        compare: starts comparing a call with those of the other ranks, which may take so many seconds to
            make theirs; gives what waits for the outcome, and raises unless all are alike.
    """

    def __init__(self, worker: Worker, compare: Callable[[Call, float], Callable[[], object]]) -> None:
        self._worker = worker
        self._compare = compare

    def start(
        self,
        name: str,
        tensor: Tensor,
        numel: int,
        root: int,
        timeout_s: float,
        begin: Callable[[], dist.Work],
        results: Sequence[Tensor],
    ) -> dist.Work:
        """Start a collective; ``elsewhere_call`` says what of it is compared.

        Args:
            name: one of ``ELSEWHERE``.
            tensor: of the dtype that must be equal.
            numel: what must be equal as well.
            root: the root rank.
            timeout_s: how long the other ranks may take to call theirs.
            begin: starts it on Gloo.
            results: the tensors that hold the result when it is done.
        """
        compared = self._compare(elsewhere_call(name, tensor, numel, root), timeout_s)

        def carry_out() -> None:
            compared()
            begin().wait()

        return TaskWork(self._worker, carry_out, results)

    def stop(self) -> None:
        """Start nothing more."""
        self._worker.stop()

    def join(self) -> None:
        """After ``stop``: wait for what is nearly through."""
        self._worker.join()


@interpreted
class GroupOverGloo(dist.ProcessGroup):
    """A process group with Gloo inside, and the collectives that always go there.

    Args:
        store: shared by exactly these ranks.
        rank: this rank in the group.
        size: number of ranks.
        timeout: how long a collective waits for the others.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the only form that a Python class can extend
        self._recorder, self._calls = recorder(), 0
        self._names: dict[str, int] = {}  # of kinds of calls, in the record
        self._inner = InnerGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        self._inner._set_sequence_number_for_group()
        self._timeout = self._inner.group_timeout
        self._gloo = dist.ProcessGroup(store, rank, size)  # see the note above
        for group in (self, self._gloo):
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._inner)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._compared: ComparedCalls | None = None  # where the ranks can compare them

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> dist.Work:
        """Gather every rank's tensor into a list of tensors on the root."""
        if not isinstance(opts, dist.GatherOptions):
            return self._gloo.gather(outputs, inputs, opts, *more)
        (source,), results = inputs, outputs[0] if outputs else []
        sent, _ = bytes_and_back([source])
        received, bring_back = bytes_and_back(results)

        def begin() -> dist.Work:
            work = self._gloo.gather([received] if outputs else [], sent, opts)
            return CopiedWork(work, bring_back, results)

        root = root_of(opts, self.size())
        return self._through_gloo("gather", source, source.numel(), root, opts, begin, results)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> dist.Work:
        """Give each rank one of the root's tensors."""
        if not isinstance(opts, dist.ScatterOptions):
            return self._gloo.scatter(outputs, inputs, opts, *more)
        (target,) = outputs
        sent = [bytes_and_back(tensors)[0] for tensors in inputs]
        received, bring_back = bytes_and_back(outputs)

        def begin() -> dist.Work:
            return CopiedWork(self._gloo.scatter(received, sent, opts), bring_back, outputs)

        root = root_of(opts, self.size())
        return self._through_gloo("scatter", target, target.numel(), root, opts, begin, outputs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Send tensor r to rank r; receive rank r's as tensor r. Sizes may differ."""
        opts = opts or dist.AllToAllOptions()
        sent = torch.cat(bytes_and_back(inputs)[0])
        sizes = [tensor.nbytes for tensor in inputs], [tensor.nbytes for tensor in outputs]
        received = sent.new_empty(sum(sizes[1]))

        def bring_back() -> None:
            for tensor, part in zip(outputs, received.split(sizes[1]), strict=True):
                tensor.copy_(part.view(tensor.dtype).view(tensor.shape))

        def begin() -> dist.Work:
            work = self._gloo.all_to_all_single(received, sent, sizes[1], sizes[0], opts)
            return CopiedWork(work, bring_back, outputs)

        return self._through_gloo("all_to_all", inputs[0], 0, 0, opts, begin, outputs)

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> dist.Work:  # noqa: N803
        """Send a tensor to one rank."""
        return self._gloo.send(bytes_and_back(tensors)[0], dstRank, tag)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> dist.Work:  # noqa: N803
        """Receive a tensor from one rank."""
        received, bring_back = bytes_and_back(tensors)
        work = self._gloo.recv(received, srcRank, tag)
        return work if bring_back is None else CopiedWork(work, bring_back, tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        """Receive a tensor from whichever rank sends one."""
        received, bring_back = bytes_and_back(tensors)
        work = self._gloo.recv_anysource(received, tag)
        return work if bring_back is None else CopiedWork(work, bring_back, tensors)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long collectives that start from now on wait for the other ranks."""
        self._timeout.seconds = timeout.total_seconds()
        super().set_timeout(timeout)

    def _note(self, kind: str, size: int) -> None:
        """Record that this rank makes the group's next call."""
        self._calls += 1
        name = self._names.get(kind)
        if name is None:
            name = self._names[kind] = self._recorder.name(f"{kind} in process group {self.group_name}")
        self._recorder.add(Fact.COLLECTIVE, self._calls, name, size)

    def _through_gloo(
        self,
        name: str,
        tensor: Tensor,
        numel: int,
        root: int,
        opts: Any,
        begin: Callable[[], dist.Work],
        results: Sequence[Tensor],
    ) -> dist.Work:
        self._note(name, tensor.numel() * tensor.element_size())
        if self._compared is None:
            return begin()
        return self._compared.start(name, tensor, numel, root, self._timeout_of(opts), begin, results)

    def _timeout_of(self, opts: Any) -> float:
        own = opts.timeout
        return own.total_seconds() if own > UNSET else self._timeout.seconds
