"""One backward pass, from its first gradient to averaged gradients on every rank.

    arm       _begin_pass      backward has started: does this one synchronise?
    ready     _gradient_ready  a parameter's gradient was accumulated
    launch    BucketLauncher.launch_full   a bucket is full and all earlier ones are launched: all-reduce it
    finish    _finish          backward has ended: launch what is missing, the tail last
                 read_tail     wait, and read what all ranks said
                 reduce_late   reduce again what got gradient after its launch
                 hand_back     point every .grad at its average
    abandon   _abandon         backward raised instead: complete the collectives, tell the others

Only autograd calls in from outside, through what ``BucketLayout``, ``prepare_for_backward``
and ``_begin_pass`` register.

Note "how backward's end is seen": the engine's callback belongs to the innermost running
graph task. Under re-entrant checkpointing that is an inner backward, which ends early. So
a hook on the forward's outputs registers it at the outermost start; the first gradient
does so where forward was bypassed. A pass that ends early on all ranks is merely less
efficient: averaging in place is idempotent.

Note "after an exception": other ranks wait for the buckets this rank has not launched. So
it launches them anyway, with a mark in the tail, and nobody gets stuck: every rank either
raises or is told which rank did, and the next pass starts clean.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.interpreted import interpreted
from paceline.comm.memory import memory_of
from paceline.comm.private_group import longest_timeout
from paceline.comm.waiting import Peers
from paceline.engine import callbacks
from paceline.engine.agreement import PlanAgreement
from paceline.engine.arrivals import Arrivals
from paceline.engine.backward_pass import BackwardPass
from paceline.engine.bucket import Slot
from paceline.engine.buffers import BufferSync
from paceline.engine.comm_hooks import Averaging, CommHook
from paceline.engine.launcher import BucketLauncher
from paceline.engine.layout import BucketLayout
from paceline.engine.lessons import Lessons, agree_on_order
from paceline.engine.options import ReducerOptions
from paceline.engine.parameters import TrainedParameters
from paceline.engine.statistics import RunStatistics
from paceline.engine.statistics_exchange import StatisticsExchange
from paceline.engine.torch_names import TorchReducerNames
from paceline.engine.usage import PassVerdict, RankReport, Standing
from paceline.engine.words import (
    words_for_changed_graph,
    words_for_failed_peer,
    words_for_out_of_step,
    words_for_unused,
)
from paceline.errors import GraphChangedError, PeerFailedError, RanksOutOfStepError, UnusedParametersError


@interpreted
class Reducer(TorchReducerNames):
    """Averages the gradients of a module's parameters over the ranks of a group.

    Args:
        parameters: the trained parameters of the wrapped module.
        group: the ranks that hold copies of the module; best one that nothing else uses.
        options: what the user decided.
    """

    def __init__(
        self, parameters: TrainedParameters, group: dist.ProcessGroup, options: ReducerOptions
    ) -> None:
        self.synchronise = True  # written by no_sync alone, read when a backward starts
        self.divide_by_active = False  # under join: divide by the ranks that still have data
        self.passes_finished = 0
        self.at_backward_end: list[Callable[[], None]] = []  # before anything is reduced
        self.at_pass_end: list[Callable[[], None]] = []  # when the averages are there
        self.buffers: BufferSync  # hears of passes; set by the wrapper, which owns both
        self.statistics = RunStatistics()
        self.options = options
        callbacks.retire_older(parameter for _, parameter in parameters.named)
        self.peers = Peers(group)
        self._arrivals = Arrivals(self._first_gradient)
        self.layout = BucketLayout(
            parameters,
            self.peers.world_size,
            options.caps,
            options.keep_shared,
            on_gradient=self._gradient_ready,
            note_gradient=self._arrivals.hook,
            allocate=memory_of(group),
            tail_alone=options.skip_unused,
            always_trailing=options.delayed,
        )
        self._agreement = PlanAgreement(self.peers, self.layout.specs, longest_timeout(group))
        self._launcher = BucketLauncher(
            self.layout, self.peers, Averaging(group), self.statistics, options.skip_unused, self._agreement
        )
        self._looked = False  # at the module, in a forward since the last pass
        self._detached = self._retired = False  # retired: a newer wrapper averages
        self._pass: BackwardPass | None = None
        self._abandoned: BackwardPass | None = None
        self._forwards = 0  # that trained, outside no_sync; in the tail, they show a skipped backward
        self._lessons = Lessons()
        self._lessons_of = {tuple(self.layout.specs): self._lessons}  # for each set of trained parameters

    # -- what the wrapper calls -------------------------------------------------------------

    def prepare_for_forward(self, training: bool = True) -> list[nn.Parameter]:
        """Before a forward whose backward may follow.

        Args:
            training: whether the module is in training mode.

        Returns:
            Parameters that the module did not have before: their values are still this rank's own.

        Raises:
            UnusedParametersError: the last synchronising pass left parameters without gradient and
                ``find_unused_parameters`` is False.
            RanksOutOfStepError: in an earlier pass the ranks trained different parameters.
        """
        if self._retired and not callbacks.owners_of_hooks(slot.parameter for slot in self.layout.slots):
            self._return()
        if self._detached or torch._C._current_graph_task_id() != -1:
            return []  # in the latter case, checkpointing recomputes inside a backward: the pass goes on
        self._agreement.check()
        self.statistics.forward_begins(self.passes_finished + 1)
        self.peers.withdraw_exception()
        if self._pass is not None:
            self._abandon(self._pass)
        if training and self.synchronise:
            self.statistics.step_begins()
        self._check_unused()
        self._settle(self.layout.changed)
        self.layout.listen()
        self._looked = True
        return self.layout.take_newcomers()

    def prepare_for_backward(self, outputs: Iterable[Tensor], training: bool = False) -> None:
        """See the outermost start of a backward from these tensors; other libraries call it as well."""
        if self._detached:
            return
        if training and self.synchronise and torch._C._current_graph_task_id() == -1:
            self._forwards += 1
        self.statistics.forward_ends(self.passes_finished + 1)
        hook = callbacks.WeakCall(self._output_reached)
        for tensor in outputs:
            if tensor.grad_fn is not None and not callbacks.is_marked(tensor, self):
                tensor.register_hook(hook)

    def tell_exception(self, error: BaseException) -> None:
        """A forward raised here: if this rank is gone soon, the others can say why.

        Not inside a backward: checkpointing stops its recomputation by an exception that it handles.
        """
        if torch._C._current_graph_task_id() == -1:
            self.peers.tell_exception(error)

    def shadow_pass(self) -> None:
        """Take part in the others' pass without data: zeros for every parameter, averages as they get.

        So an optimizer that is joined along, and steps on this rank too, finds the right gradients.
        """
        current = BackwardPass(self.passes_finished + 1, synchronises=True, engaged=True)
        current.standing = Standing.OUT_OF_DATA
        self.drop_gradients()
        self._finish(current)

    def give_up(self) -> None:
        """This rank's step has failed: see to it that the others' pass fails as well, and does not wait."""
        if self._pass is not None:
            self._abandon(self._pass)
        if self._abandoned is None:
            self._pass = BackwardPass(self.passes_finished + 1, synchronises=True, engaged=True)
            self._abandon(self._pass)

    def drop_gradients(self) -> None:
        """Set every ``.grad`` to None."""
        for slot in self.layout.slots:
            slot.parameter.grad = None

    def count_forwards_anew(self) -> None:
        """All ranks are in step here, however many forwards each has run."""
        self._forwards = 0

    def detach(self) -> None:
        """Average nothing from now on: another wrapper does, or none; gradients stay where they are."""
        self._detached = True
        self.layout.stop_watching()

    def retire(self) -> None:
        """Average nothing as long as a newer wrapper of the same parameters lives."""
        self._retired = True
        self.detach()

    def _return(self) -> None:
        """The newer wrapper is gone: average again."""
        self._retired = self._detached = False
        self.layout.watch()

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that gradients are averaged over."""
        return self.peers.group

    @property
    def hook(self) -> CommHook | None:
        """The user's communication hook, None for averaging."""
        return self._launcher.hook

    @hook.setter
    def hook(self, hook: CommHook | None) -> None:
        self._launcher.hook = hook

    def set_static_graph(self) -> None:
        """From the first pass on, every pass must use the same parameters equally often."""
        self.options = dataclasses.replace(self.options, static_graph=True)

    def check_finished(self) -> None:
        """Raise if a backward was started and has not come to its end."""
        if self._pass is not None:
            raise RuntimeError(f"backward pass {self._pass.number} of this wrapper has not ended")

    def users_of_parameters(self) -> list[int]:
        """Number of ranks that reached each parameter in the last synchronising pass."""
        return self._lessons.users or [self.peers.world_size] * len(self.layout.slots)

    @property
    def arrival_order(self) -> list[int] | None:
        """The order of arrival that the buckets follow, None before the first replanning."""
        return None if self._lessons.replan_due else self._lessons.order

    def _check_unused(self) -> None:
        unused, self._lessons.unused = self._lessons.unused, None
        if unused is None:
            return
        allowed = self.options.find_unused_parameters or self.options.static_graph
        words = ""
        if unused and not allowed:
            words = words_for_unused(self.peers, self.passes_finished, unused, self.layout.slots)
        for slot in self.layout.slots:
            slot.reached = False
        if words:
            raise self.statistics.note(UnusedParametersError(words))

    # -- arm --------------------------------------------------------------------------------

    def _output_reached(self, gradient: Tensor) -> None:
        if self._pass is None:
            self._begin_pass(engaged=self.layout.accumulates_now())

    def _begin_pass(self, engaged: bool) -> BackwardPass:
        self._settle(self.layout.replaced_or_frozen if self._looked else self.layout.changed)
        current = self._pass = BackwardPass(self.passes_finished + 1, self.synchronise, engaged)
        self.statistics.backward_begins(current.number)
        callbacks.at_end_of_backward(self._finish, self._abandon, current)
        self._arrivals.open()
        for bucket in self.layout.buckets:
            bucket.ensure_unshared()
        return current

    def _settle(self, changed: Callable[[], bool]) -> None:
        """Between passes: finish what an exception left, follow the module, apply a new plan.

        Asks before every forward and backward whether the module has changed; not with low-precision
        copies, under which parameters look changed while they are not.
        """
        if self._abandoned is not None:
            self._drain(self._abandoned)
        if self.options.eager and changed():
            self._follow_module()
        elif self._lessons.replan_due and self._lessons.order is not None:
            self._lessons.replan_due = False
            self.layout.replan(self._lessons.order, self._lessons.trailing)

    def _follow_module(self) -> None:
        """Lay out other parameters; what was learned with exactly those counts again.

        So ranks that return to the same parameters have the same plan, whatever one of them froze
        and unfroze in between, and toggling costs nothing.
        """
        checked = self._lessons.unused is None
        if not self.layout.refresh():
            return
        self._lessons = self._lessons_of.setdefault(tuple(self.layout.specs), Lessons())
        self._lessons.unused, self._lessons.replan_due = None, False
        if self._lessons.order is not None:
            self.layout.replan(self._lessons.order, self._lessons.trailing)
        for slot, count in zip(self.layout.slots, self._lessons.firings or (), strict=False):
            slot.expected_firings = count or slot.expected_firings
        for slot in self.layout.slots:
            slot.reached = slot.reached and checked

    # -- ready ------------------------------------------------------------------------------

    def _first_gradient(self, parameter: Tensor) -> None:
        self._begin_pass(engaged=True)
        self._arrivals.note(parameter)

    def _gradient_ready(self, slot: Slot) -> None:
        """A gradient has arrived that is likely to fill its bucket, or that is to be copied at once."""
        current = self._pass or self._begin_pass(engaged=True)
        self._arrivals.note(slot.parameter)
        self._take_in(current)
        if not self.options.eager:
            return
        if slot.copies_at_once and not slot.bucket.launched:
            slot.bucket.adopt(slot)
        if current.synchronises and not self.layout.others_follow(slot):
            self._launcher.launch_full(current)

    def _take_in(self, current: BackwardPass) -> None:
        current.take_in(self.layout.slots_of(self._arrivals.news()))

    # -- finish -----------------------------------------------------------------------------

    def _finish(self, current: BackwardPass) -> None:
        self._pass = None
        try:
            self._take_in(current)
            _call_all(self.at_backward_end)
            self.statistics.backward_ends(current.number)
            if current.synchronises and current.engaged and self.layout.buckets:
                self._launcher.launch_rest(current, functools.partial(self._report, current))
                self._conclude(current, self._launcher.read_tail(current))
                _call_all(self.at_pass_end)
        finally:
            self._reset()

    def _conclude(self, current: BackwardPass, verdict: PassVerdict) -> None:
        self.passes_finished += 1
        self.buffers.hear_forms(verdict.buffers_alike())
        self._check_verdict(current, verdict)
        self._launcher.launch_used(current, verdict)
        self._launcher.reduce_late(current, verdict.late_buckets)
        if self.divide_by_active and self.hook is None:
            self._launcher.scale(self.peers.world_size / verdict.active_ranks())
        nowhere = verdict.held_nowhere()
        for bucket in self.layout.buckets:
            bucket.hand_back(nowhere)
        self.buffers.after_pass(current.number)
        self.statistics.communication_ends(current.number, sum(b.launched for b in self.layout.buckets))
        self._learn(current, verdict)
        self._compare_graph(current)

    def _check_verdict(self, current: BackwardPass, verdict: PassVerdict) -> None:
        failed = self.peers.in_job(verdict.failed_ranks())
        if failed:
            StatisticsExchange.abandon()
            words = words_for_failed_peer(self.peers, current.number, failed)
            raise self.statistics.note(PeerFailedError(words))
        if not verdict.in_step():
            self._forwards, self.passes_finished = 0, max(verdict.pass_numbers)  # from here in step again
            words = words_for_out_of_step(self.peers.global_rank, current.number, verdict)
            raise self.statistics.note(RanksOutOfStepError(words))

    def _learn(self, current: BackwardPass, verdict: PassVerdict) -> None:
        """What this pass teaches for the next: order of arrival, parameters often unused."""
        lessons = self._lessons
        lessons.unused = verdict.unused_somewhere(self.peers.world_size)
        lessons.users = verdict.users
        if lessons.order is None:
            device, count = self.layout.tail.device, len(self.layout.slots)
            lessons.order = agree_on_order(current.arrivals, count, self.peers, current.number, device)
            lessons.replan_due = True
        unseen = lessons.unused.keys() - lessons.trailing
        if unseen and self.options.find_unused_parameters:
            lessons.trailing |= unseen
            lessons.replan_due = True

    def _compare_graph(self, current: BackwardPass) -> None:
        """Note how often each parameter fired, and raise if a graph declared static has changed."""
        firings = [slot.firings for slot in self.layout.slots]
        before, self._lessons.firings = self._lessons.firings, firings
        if firings == before:
            return
        for slot in self.layout.slots:
            slot.expected_firings = slot.firings or slot.expected_firings
        if before is None:
            return
        self._lessons.graph_changed = True
        if self.options.static_graph:
            changed = [s for s, count in zip(self.layout.slots, before, strict=True) if s.firings != count]
            unreached = [(slot.index, slot.name) for slot in changed if not slot.firings]
            names = [slot.name for slot in changed]
            words = words_for_changed_graph(self.peers.global_rank, current.number, unreached, names)
            raise self.statistics.note(GraphChangedError(words))

    def _reset(self) -> None:
        self._looked = False
        self._agreement.after_pass()
        self._arrivals.close()
        for slot in self.layout.slots:
            slot.firings = 0
        for bucket in self.layout.buckets:
            bucket.pending = len(bucket.slots)
            bucket.launched = False

    # -- abandon ----------------------------------------------------------------------------

    def _abandon(self, current: BackwardPass) -> None:
        """Backward raised. Complete the collectives the others wait for, and mark the pass."""
        if self._pass is not current:
            return
        self._pass = None
        self._take_in(current)
        StatisticsExchange.abandon()
        _call_all(self.at_backward_end)
        if current.synchronises and current.engaged:
            self._abandoned = current
            current.standing = Standing.RAISED
            with contextlib.suppress(Exception):  # this is a finalizer, and the group may be what failed
                self._launcher.launch_rest(current, functools.partial(self._report, current))
        self._reset()

    def _drain(self, abandoned: BackwardPass) -> None:
        """Wait for what ``_abandon`` launched; its result is worth nothing."""
        self._abandoned = None
        self.passes_finished += 1
        self.buffers.hear_forms(False)
        self._launcher.land(abandoned)

    # -- words ------------------------------------------------------------------------------

    def _report(self, current: BackwardPass) -> RankReport:
        has_data = current.standing.has_data
        return RankReport(
            rank=self.peers.rank,
            pass_number=current.number,
            plan_fingerprint=self.layout.plan.fingerprint,
            forwards=self._forwards,
            standing=current.standing,
            buffer_forms=self.buffers.report_forms(),
            without_gradient=[slot.index for slot in self._launcher.slots_without_gradient()],
            unreached=[slot.index for slot in self.layout.slots if has_data and not slot.reached],
            late_buckets=sorted(current.late),
        )


def _call_all(callbacks: Iterable[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()
