"""Launching buckets: in the same order on all ranks, as soon as they are full, and waiting for them.

Note "launch order": all ranks launch the same buckets in the same order, whatever order
their gradients arrive in. The first plan is reverse registration order; after the first
pass rank 0's order of arrival replaces it on all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from paceline.comm.waiting import Peers
from paceline.engine.agreement import PlanAgreement
from paceline.engine.backward_pass import BackwardPass, Flight
from paceline.engine.bucket import Bucket, GradBucket, Slot
from paceline.engine.comm_hooks import Averaging, CommHook
from paceline.engine.layout import BucketLayout
from paceline.engine.statistics import RunStatistics
from paceline.engine.usage import PassVerdict, RankReport
from paceline.engine.words import name_bucket, name_only_bucket, name_tail


class BucketLauncher:
    """Launches the buckets of a layout and waits for them.

    Args:
        layout: the buckets.
        peers: names the rank behind a wait that fails.
        averaging: how tensors are averaged.
        statistics: takes note of the first launch.
        skip_unused: whether trailing buckets wait for the tail and are left out if no rank needs them.
        agreement: makes sure that all ranks launch buckets of the same parameters.
    """

    def __init__(
        self,
        layout: BucketLayout,
        peers: Peers,
        averaging: Averaging,
        statistics: RunStatistics,
        skip_unused: bool,
        agreement: PlanAgreement,
    ) -> None:
        self.hook: CommHook | None = None  # reduces buckets in place of averaging
        self._layout = layout
        self._peers = peers
        self._averaging = averaging
        self._statistics = statistics
        self._skip_unused = skip_unused
        self._agreement = agreement

    def launch_full(self, current: BackwardPass) -> None:
        """Launch every full bucket whose turn it is; those from ``_held_back`` on wait for the end."""
        buckets, end = self._layout.buckets, self._held_back()
        while current.next_launch < end and buckets[current.next_launch].pending == 0:
            self._agree(current)
            self._launch(current, buckets[current.next_launch])

    def _held_back(self) -> int:
        """Index of the first bucket that is launched only when backward has ended."""
        return self._layout.first_trailing if self._skip_unused else len(self._layout.buckets) - 1

    def _launch(self, current: BackwardPass, bucket: Bucket) -> None:
        self._fill(current, bucket)
        self._take_off(current, bucket)

    def launch_rest(self, current: BackwardPass, report: Callable[[], RankReport]) -> None:
        """Launch what is left, in order; the last bucket takes the tail along where it can.

        Args:
            current: the pass.
            report: gives what this rank says in the tail, once all buckets are filled.
        """
        self._agree(current)
        for bucket in self._layout.buckets[current.next_launch : self._held_back()]:
            self._launch(current, bucket)
        if self._skip_unused:
            self._write_tail(report())
        else:
            last = self._layout.buckets[-1]
            self._fill(current, last)
            self._write_tail(report())
            self._take_off(current, last)
        if self.hook is not None:
            self.land(current)
        if self.hook is not None or not self._layout.tail_travels_in_last_bucket:
            what = functools.partial(name_tail, current.number)
            current.flights.append(self._average(self._layout.tail, what))

    def slots_without_gradient(self) -> Iterator[Slot]:
        """Slots whose parameters have no gradient on this rank, as far as is known now."""
        for bucket in self._layout.buckets:
            for slot in bucket.missing if bucket.launched else bucket.slots:
                if slot.parameter.grad is None:
                    yield slot

    def launch_used(self, current: BackwardPass, verdict: PassVerdict) -> None:
        """Under ``skip_unused``, now that the tail is known: launch the buckets that some rank needs."""
        if not self._skip_unused:
            return
        nowhere = verdict.held_nowhere()
        for bucket in self._layout.buckets[current.next_launch :]:
            if any(slot.index not in nowhere for slot in bucket.slots):
                self._launch(current, bucket)
        self.land(current)

    def _agree(self, current: BackwardPass) -> None:
        self._agreement.check()
        if current.next_launch == 0:
            self._agreement.before_launch(self._layout.specs, current.number)

    def _write_tail(self, report: RankReport) -> None:
        self._layout.tail_layout.write(self._layout.tail, report)

    def _fill(self, current: BackwardPass, bucket: Bucket) -> None:
        with torch.no_grad():
            bucket.fill()
        bucket.launched = True
        current.next_launch = bucket.index + 1
        name = (self._layout.plan.fingerprint, bucket.index)
        self._statistics.launched(current.number, name, functools.partial(self._describe, bucket))

    def _describe(self, bucket: Bucket) -> str:
        size = sum(slot.parameter.nbytes for slot in bucket.slots)
        names = [slot.name for slot in bucket.slots]
        return f"{name_only_bucket(bucket.index, len(self._layout.buckets), names)} of {size:,} bytes"

    def _take_off(self, current: BackwardPass, bucket: Bucket) -> None:
        names = [slot.name for slot in bucket.slots]
        what = functools.partial(name_bucket, current.number, bucket.index, len(self._layout.buckets), names)
        flight = self._run_hook(current, bucket, what) if self.hook else self._average(bucket.payload(), what)
        current.flights.append(flight)

    def _run_hook(self, current: BackwardPass, bucket: Bucket, what: Callable[[], str]) -> Flight:
        """Start the hook for a bucket when that for the bucket before is done.

        Note "hooks take turns": a hook may issue further collectives from callbacks on its first
        one (PowerSGD does). Were another bucket launched meanwhile, ranks could issue the two in
        different orders.
        """
        assert self.hook is not None
        self.land(current)
        is_last = bucket.index == len(self._layout.buckets) - 1
        try:
            future = self.hook.function(self.hook.state, GradBucket(bucket, is_last))
        except Exception as error:
            self._agreement.give_up(error, current.number)
            raise
        on_cpu = self._layout.tail.device.type == "cpu"
        return Flight(
            done=future.done,
            wait=functools.partial(self._peers.wait_for_value, future, what) if on_cpu else future.wait,
            land=lambda: bucket.accept(_only_tensor(future.value())),
        )

    @torch.no_grad()
    def _average(self, tensor: Tensor, what: Callable[[], str]) -> Flight:
        try:
            work = self._averaging.start(tensor)
        except RuntimeError as error:
            raise self._peers.explain(error, what()) from error
        on_cpu = tensor.device.type == "cpu"
        return Flight(
            done=work.is_completed,
            wait=functools.partial(self._peers.wait, work, what) if on_cpu else work.wait,
            land=functools.partial(self._averaging.complete, tensor),
        )

    @torch.no_grad()
    def land(self, current: BackwardPass) -> None:
        """Wait for everything under way."""
        flights, current.flights = current.flights, []
        for flight in flights:
            flight.wait()
            flight.land()

    def read_tail(self, current: BackwardPass) -> PassVerdict:
        """Wait for everything under way, and read what all ranks said."""
        self.land(current)
        return self._layout.tail_layout.read(self._layout.tail)

    def reduce_late(self, current: BackwardPass, indices: list[int]) -> None:
        """Reduce again what got gradient after its launch; averaging is idempotent."""
        for index in indices:
            bucket = self._layout.buckets[index]
            with torch.no_grad():
                bucket.absorb_late()
            self._take_off(current, bucket)
        self.land(current)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply every average by ``factor``."""
        for bucket in self._layout.buckets:
            bucket.gradients_only().mul_(factor)


def _only_tensor(value: Any) -> Tensor:
    """A hook's future holds a tensor, or a list of one."""
    tensor = value[0] if isinstance(value, list | tuple) else value
    assert isinstance(tensor, Tensor)
    return tensor
