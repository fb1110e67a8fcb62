"""Defects of the engine, each planted by replacing one or two of its functions in a rank.

``Planted(name, function)`` is a picklable function for ``run_ranks`` that plants a defect and then does what
``function`` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from paceline.engine import ddp, layout, reducer
from paceline.engine.backward_pass import BackwardPass
from paceline.engine.bucket import DenseBucket, SparseBucket
from paceline.engine.buffers import BufferSync
from paceline.engine.comm_hooks import Averaging
from paceline.engine.ddp import DistributedDataParallel
from paceline.engine.launcher import BucketLauncher
from paceline.engine.layout import BucketLayout
from paceline.engine.plan import BucketCaps
from paceline.engine.reducer import Reducer
from paceline.engine.usage import PassVerdict
from paceline.errors import GraphChangedError, UnusedParametersError

CANNOT_PLANT = "cannot plant"  # the engine has changed, and the defect must follow
DEFECTS: dict[str, Callable[[], None]] = {}


class Planted:
    """A function for ranks, run with a defect in the engine.

    Args:
        defect: key of ``DEFECTS``, or None for an engine as it is.
        function: what the rank does then.
    """

    def __init__(self, defect: str | None, function: Callable[..., Any]) -> None:
        self.defect, self.function = defect, function

    def __call__(self, *args: Any) -> Any:
        if self.defect is not None:
            try:
                DEFECTS[self.defect]()
            except Exception as error:
                raise LookupError(f"{CANNOT_PLANT} {self.defect}: {error}") from error
        return self.function(*args)


def defect(plant: Callable[[], None]) -> Callable[[], None]:
    """Enter a function that plants a defect under its name."""
    DEFECTS[plant.__name__] = plant
    return plant


def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Put ``wrapper(original, *arguments)`` in place of a function that must exist."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def instead(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Put a replacement in place of a function that must exist."""
    assert callable(getattr(owner, name))
    setattr(owner, name, replacement)


# -- what is computed --------------------------------------------------------------------------


@defect
def never_reduces() -> None:
    local: dict[Any, torch.Tensor] = {}

    def fill(original: Any, self: Any, current: Any, bucket: Any) -> None:
        original(self, current, bucket)
        if not bucket.payload().is_sparse:
            local[bucket] = bucket.gradients_only().clone()

    def read(original: Any, self: Any, current: Any) -> Any:
        verdict = original(self, current)
        for bucket, gradients in local.items():
            bucket.gradients_only().copy_(gradients)
        local.clear()
        return verdict

    around(BucketLauncher, "_fill", fill)
    around(BucketLauncher, "read_tail", read)


def _after_reduction(change: Callable[[Any, PassVerdict], None]) -> None:
    """``change(launcher, verdict)`` when the averages are there."""

    def read(original: Any, self: Any, current: Any) -> PassVerdict:
        verdict = original(self, current)
        change(self, verdict)
        return verdict

    around(BucketLauncher, "read_tail", read)


@defect
def sums_instead_of_averages() -> None:
    _after_reduction(lambda launcher, _: launcher.scale(dist.get_world_size()))


@defect
def averages_over_the_ranks_that_used_it() -> None:
    def change(launcher: Any, verdict: PassVerdict) -> None:
        for bucket in launcher._layout.buckets:
            for slot in bucket.slots:
                holders = verdict.holders[slot.index] if verdict.holders else dist.get_world_size()
                if holders:
                    slot.view.mul_(dist.get_world_size() / holders)

    _after_reduction(change)


@defect
def ranks_differ_in_the_last_bits() -> None:
    _after_reduction(lambda launcher, _: launcher.scale(1 + 3e-7 * dist.get_rank()))


@defect
def half_precision_is_summed_before_the_division() -> None:
    instead(Averaging, "_divides_first", lambda self, tensor: tensor.is_sparse)


@defect
def moved_gradients_stay_where_they_are() -> None:
    instead(DenseBucket, "_reclaim", lambda self: self._allocated())


@defect
def unused_parameters_get_zeros() -> None:
    instead(PassVerdict, "held_nowhere", lambda self: frozenset())


@defect
def late_gradients_are_lost() -> None:
    def drop(self: Any, current: Any, indices: list[int]) -> None:
        for index in indices:
            for slot in self._layout.buckets[index].slots:
                slot.parameter.grad = None

    instead(BucketLauncher, "reduce_late", drop)


@defect
def ranks_without_data_always_count() -> None:
    instead(BucketLauncher, "scale", lambda self, factor: None)


@defect
def sparse_gradients_become_dense() -> None:
    def hand_back(original: Any, self: Any, *args: Any) -> None:
        original(self, *args)
        for slot in self.slots:
            if slot.parameter.grad is not None:
                slot.parameter.grad = slot.parameter.grad.to_dense()

    around(SparseBucket, "hand_back", hand_back)


# -- where gradients live -----------------------------------------------------------------------


@defect
def a_second_copy_of_the_gradients() -> None:
    def hand_back(original: Any, self: Any, *args: Any) -> None:
        original(self, *args)
        for slot in self.slots:
            if slot.parameter.grad is not None:
                slot.parameter.grad = slot.parameter.grad.clone()

    around(DenseBucket, "hand_back", hand_back)


@defect
def bucket_views_are_ignored() -> None:
    def start(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._keep_shared = True

    around(DenseBucket, "__init__", start)


@defect
def kept_gradients_are_overwritten() -> None:
    instead(DenseBucket, "ensure_unshared", lambda self: None)


# -- when and what is sent ------------------------------------------------------------------------


@defect
def the_bucket_cap_is_ignored() -> None:
    instead(BucketCaps, "limit", lambda self, position: 1 << 40)


@defect
def everything_is_launched_at_the_end() -> None:
    instead(BucketLauncher, "launch_full", lambda self, current: None)


@defect
def each_rank_follows_its_own_order() -> None:
    def own_order(original: Any, arrivals: list[int], count: int, *rest: Any) -> list[int]:
        original(arrivals, count, *rest)
        return [*arrivals, *(index for index in range(count) if index not in arrivals)]

    around(reducer, "agree_on_order", own_order)


@defect
def the_order_of_arrival_is_never_used() -> None:
    def replan(original: Any, self: Any, order: list[int], trailing: Any) -> None:
        original(self, sorted(order, reverse=True), trailing)

    around(BucketLayout, "replan", replan)


@defect
def unused_parameters_hold_up_others() -> None:
    around(layout, "plan_buckets", lambda original, specs, order, caps, _: original(specs, order, caps))


@defect
def a_full_bucket_waits_for_the_gradient_that_was_last_in_the_plan() -> None:
    def take_in(original: Any, self: Any, arrived: Any) -> None:
        original(self, arrived := list(arrived))
        for slot in arrived:
            slot.bucket.last = slot.bucket.slots[-1]

    around(BackwardPass, "take_in", take_in)


@defect
def a_pass_begins_at_the_forwards_outputs_alone() -> None:
    instead(Reducer, "_first_gradient", lambda self, parameter: None)


@defect
def users_hooks_come_too_late() -> None:
    instead(BucketLayout, "others_follow", lambda self, slot: False)


@defect
def the_tail_costs_a_collective() -> None:
    def start(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs | {"tail_alone": True})

    around(BucketLayout, "__init__", start)


@defect
def autograd_grad_communicates() -> None:
    instead(BucketLayout, "accumulates_now", lambda self: True)


@defect
def the_hook_is_skipped() -> None:
    instead(DistributedDataParallel, "_set_hook", lambda self, *args: None)


@defect
def the_hooks_result_is_ignored() -> None:
    instead(DenseBucket, "accept", lambda self, result: None)


# -- no_sync ----------------------------------------------------------------------------------


@defect
def no_sync_is_ignored() -> None:
    instead(DistributedDataParallel, "no_sync", lambda self: contextlib.nullcontext())


@defect
def no_sync_counts_in_forward() -> None:
    def forward(original: Any, self: Any, *args: Any) -> Any:
        self.planted = self.synchronise
        return original(self, *args)

    def begin(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        now, self.synchronise = self.synchronise, getattr(self, "planted", True)
        try:
            return original(self, *args, **kwargs)
        finally:
            self.synchronise = now

    around(Reducer, "prepare_for_forward", forward)
    around(Reducer, "_begin_pass", begin)


@defect
def no_sync_stays_after_an_exception() -> None:
    @contextlib.contextmanager
    def no_sync(self: Any) -> Iterator[None]:
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        yield
        self.require_backward_grad_sync = before

    instead(DistributedDataParallel, "no_sync", no_sync)


# -- replicas -----------------------------------------------------------------------------------


@defect
def construction_broadcasts_nothing() -> None:
    instead(DistributedDataParallel, "_make_replicas_equal", lambda self: None)


@defect
def construction_compares_nothing() -> None:
    instead(ddp, "verify_same_parameters", lambda *args: None)


@defect
def buffers_are_never_broadcast() -> None:
    instead(BufferSync, "take_turn", lambda self, passes_finished: False)


@defect
def buffers_differ_until_the_next_forward() -> None:
    instead(BufferSync, "after_pass", lambda self, number: None)


@defect
def buffers_are_broadcast_in_every_forward() -> None:
    around(
        DistributedDataParallel,
        "forward",
        lambda original, self, *args, **kwargs: (
            self.buffer_sync.broadcast(source=0),
            original(self, *args, **kwargs),
        )[1],
    )


@defect
def a_changed_module_is_not_noticed() -> None:
    for question in ("changed", "replaced_or_frozen"):
        instead(BucketLayout, question, lambda self: False)


@defect
def new_parameters_are_not_broadcast() -> None:
    around(Reducer, "prepare_for_forward", lambda original, self, *args: (original(self, *args), [])[1])


# -- what must be an error ------------------------------------------------------------------------


def _swallow(owner: Any, name: str, kind: type[Exception]) -> None:
    def quiet(original: Any, *args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(kind):
            original(*args, **kwargs)

    around(owner, name, quiet)


@defect
def unused_parameters_are_not_an_error() -> None:
    _swallow(Reducer, "_check_unused", UnusedParametersError)


@defect
def static_graph_is_ignored() -> None:
    _swallow(Reducer, "_compare_graph", GraphChangedError)


@defect
def ranks_out_of_step_are_not_noticed() -> None:
    instead(PassVerdict, "in_step", lambda self: True)


@defect
def a_peers_failure_is_not_noticed() -> None:
    instead(PassVerdict, "failed_ranks", lambda self: [])


@defect
def a_failed_backward_leaves_the_others_waiting() -> None:
    def abandon(self: Any, current: Any) -> None:
        if self._pass is current:
            self._pass = None
            self._reset()

    instead(Reducer, "_abandon", abandon)
