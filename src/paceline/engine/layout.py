"""Parameters laid out in buckets, and the hooks by which autograd reports their gradients.

The layout follows the module: ``refresh`` takes the parameters that are trained now,
``replan`` moves them into other buckets. Gradients move over as they are next touched, so
no change copies anything by itself.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.comm.memory import Allocate, plain_memory
from paceline.engine.bucket import Bucket, DenseBucket, Slot, SparseBucket
from paceline.engine.callbacks import WeakCall
from paceline.engine.parameters import TrainedParameters, gradient_dtype
from paceline.engine.plan import BucketCaps, BucketPlan, ParameterSpec, plan_buckets, registration_order
from paceline.engine.usage import TailLayout

_COPIES_AT_ONCE = operator.attrgetter("copies_at_once")
_EXACT_TO_2_TO_20 = (torch.float32, torch.float64)  # dtypes in which the tail's whole numbers survive


class BucketLayout:
    """The slots and buckets of the parameters that are trained now.

    Args:
        parameters: the trained parameters of the module.
        world_size: number of ranks.
        caps: bucket sizes.
        keep_shared: see ``DenseBucket``.
        on_gradient: a bound method, called with the slot after an accumulation into its parameter's
            ``.grad`` as long as its object lives; only at those slots to which the layout listens.
        note_gradient: called with the parameter after an accumulation into its ``.grad`` elsewhere.
        allocate: makes the buckets' storage.
        tail_alone: whether the tail never travels in a bucket.
        always_trailing: names of parameters that travel in trailing buckets from the start.
    """

    def __init__(
        self,
        parameters: TrainedParameters,
        world_size: int,
        caps: BucketCaps,
        keep_shared: bool,
        on_gradient: Callable[[Slot], None],
        note_gradient: Callable[[Tensor], None],
        allocate: Allocate = plain_memory,
        tail_alone: bool = False,
        always_trailing: Set[str] = frozenset(),
    ) -> None:
        self._parameters = parameters
        self._world_size = world_size
        self._caps = caps
        self._keep_shared = keep_shared
        self._on_gradient = weakref.WeakMethod(on_gradient)
        self._note_gradient = note_gradient
        self._allocate = allocate
        self._tail_alone = tail_alone
        self._always_trailing = always_trailing
        self._hooks: dict[nn.Parameter, RemovableHandle] = {}
        self._listening: set[Slot] = set()
        self.slots: list[Slot] = []
        self._by_id: dict[int, Slot] = {}  # by the id of its parameter
        self.buckets: list[Bucket] = []
        self.plan: BucketPlan
        self.first_trailing: int  # index of the first bucket of trailing parameters
        self.tail_layout: TailLayout
        self.tail_travels_in_last_bucket = False
        weakref.finalize(self, _remove_hooks, self._hooks)
        self._take_parameters()

    @property
    def specs(self) -> list[ParameterSpec]:
        """What the plan knows of each parameter, by index."""
        return self._parameters.specs

    def changed(self) -> bool:
        """Whether the module's trained parameters are others than those laid out."""
        return self._parameters.changed()

    def replaced_or_frozen(self) -> bool:
        """As ``changed``, but cheaper: what can change between a forward and its backward."""
        return self._parameters.replaced_or_frozen()

    def refresh(self) -> bool:
        """Lay out the parameters that are trained now; returns whether they are others than before."""
        before = self._parameters.specs
        self._parameters.scan()
        trained = [slot.parameter for slot in self.slots]
        now = [parameter for _, parameter in self._parameters.named]
        if self._parameters.specs == before and all(map(operator.is_, trained, now)):
            return False
        self._take_parameters()
        return True

    def take_newcomers(self) -> list[nn.Parameter]:
        """Parameters that came to the module since the last call; their values are still this rank's own."""
        newcomers, self._parameters.newcomers = self._parameters.newcomers, []
        return newcomers

    def replan(self, order: list[int], trailing: Set[int]) -> None:
        """Move the parameters into buckets filled in ``order``; see ``plan_buckets``."""
        specs = self._parameters.specs
        behind = {slot.index for slot in self.slots if slot.name in self._always_trailing}.union(trailing)
        self.plan = plan_buckets(specs, order, self._caps, behind)
        self.first_trailing = sum(bucket[0] not in behind for bucket in self.plan.buckets)
        count = len(self.plan.buckets)
        self.tail_layout = TailLayout(self._world_size, len(specs), count)
        for slot in self.slots:
            slot.view = None
        self.buckets = [self._make_bucket(position, position == count - 1) for position in range(count)]
        last = self.buckets[-1] if self.buckets else None
        self.tail_travels_in_last_bucket = isinstance(last, DenseBucket) and last.has_tail
        self._separate_tail: Tensor | None = None
        self.listen()

    @property
    def tail(self) -> Tensor:
        """Where the tail is written: behind the last bucket's gradients, or in a tensor of its own."""
        last = self.buckets[-1]
        if self.tail_travels_in_last_bucket:
            assert isinstance(last, DenseBucket)
            return last.tail
        if self._separate_tail is None:
            device = last.slots[0].parameter.device
            self._separate_tail = self._allocate(self.tail_layout.numel, dtype=torch.float32, device=device)
        return self._separate_tail

    def accumulates_now(self) -> bool:
        """Whether the running graph task accumulates into any ``.grad`` (``autograd.grad`` does not)."""
        return any(
            _will_run(_accumulating_node(slot.parameter))
            for slot in self.slots
            if slot.parameter.requires_grad
        )

    def slots_of(self, parameters: list[Tensor]) -> Iterator[Slot]:
        """The slots of parameters, but of those that the module let go of between forward and backward."""
        return filter(None, map(self._by_id.get, map(id, parameters)))

    def stop_watching(self) -> None:
        """Take the hooks off the parameters."""
        _remove_hooks(self._hooks)

    def watch(self) -> None:
        """Put hooks on the parameters that have none."""
        for slot in self.slots:
            if slot.parameter not in self._hooks:
                self._hooks[slot.parameter] = self._hook(slot)

    def listen(self) -> None:
        """Between passes: let ``on_gradient`` be called where buckets are likely to become full.

        That is where they did in the last pass, and at large gradients, which are copied at once. It is
        called after all other hooks of the parameter, so that a bucket may be launched right there.
        """
        full_at = {bucket.last for bucket in self.buckets}
        before = self._listening
        if not full_at <= before:
            self._listening = full_at.union(filter(_COPIES_AT_ONCE, self.slots))
        followed = set(filter(self.others_follow, self._listening))
        for slot in followed | (before ^ self._listening):
            if slot.parameter in self._hooks:
                self._hooks[slot.parameter].remove()
                self._hooks[slot.parameter] = self._hook(slot)

    def others_follow(self, slot: Slot) -> bool:
        """Whether hooks of others run after ours on the parameter, and want to see the gradient, too."""
        hooks, ours = slot.parameter._post_accumulate_grad_hooks, self._hooks.get(slot.parameter)
        return ours is not None and next(reversed(hooks)) != ours.id

    def _take_parameters(self) -> None:
        slots = []
        for index, (name, parameter) in enumerate(self._parameters.named):
            slot = self._by_id.get(id(parameter)) or Slot(parameter)
            slot.index, slot.name = index, name
            slots.append(slot)
        self.slots = slots
        self._by_id = {id(slot.parameter): slot for slot in slots}
        for parameter in self._hooks.keys() - {slot.parameter for slot in slots}:
            self._hooks.pop(parameter).remove()
        self.replan(registration_order(len(slots)), frozenset())
        self.watch()

    def _hook(self, slot: Slot) -> RemovableHandle:
        hook = self._note_gradient
        if slot in self._listening:
            on_gradient = self._on_gradient()
            assert on_gradient is not None  # its owner is what makes layouts
            hook = WeakCall(on_gradient, slot)
        handle: RemovableHandle = slot.parameter.register_post_accumulate_grad_hook(hook)
        return handle

    def _make_bucket(self, position: int, is_last: bool) -> Bucket:
        indices = self.plan.buckets[position]
        slots = [self.slots[index] for index in indices]
        if self._parameters.specs[indices[0]].sparse:
            return SparseBucket(position, slots[0])
        carries_tail = (
            is_last and not self._tail_alone and gradient_dtype(slots[0].parameter) in _EXACT_TO_2_TO_20
        )
        tail_numel = self.tail_layout.numel if carries_tail else 0
        return DenseBucket(position, slots, tail_numel, self._keep_shared, self._allocate)


def _remove_hooks(hooks: dict[nn.Parameter, RemovableHandle]) -> None:
    for handle in hooks.values():
        handle.remove()
    hooks.clear()


def _accumulating_node(parameter: nn.Parameter) -> Any:
    with torch.enable_grad():
        view = parameter.view_as(parameter)
    assert view.grad_fn is not None
    return view.grad_fn.next_functions[0][0]


def _will_run(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # the node is an input of autograd.grad: captured there, not accumulated
        return False
