"""How autograd calls the reducer without keeping it alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.autograd import Variable

from paceline.comm.interpreted import interpreted


@interpreted
class WeakCall:
    """A bound method as a callback that does nothing once its object is gone.

    Attributes:
        owner: refers to the object; by it, hooks of ours are told from users'.

    Args:
        method: a bound method.
        bound: passed to it in place of what the caller passes, if given.
    """

    __slots__ = ("_bound", "_function", "owner")

    def __init__(self, method: Callable[..., None], *bound: Any) -> None:
        self.owner = weakref.ref(method.__self__)  # type: ignore[attr-defined]
        self._function = method.__func__  # type: ignore[attr-defined]
        self._bound = bound

    def __call__(self, *passed: Any) -> None:
        alive = self.owner()
        if alive is not None:
            self._function(alive, *(self._bound or passed))


def owners_of_hooks(parameters: Iterable[Tensor]) -> set[Any]:
    """The objects whose ``WeakCall`` stands on these parameters, as far as they live."""
    hooks = (parameter._post_accumulate_grad_hooks for parameter in parameters)
    return set().union(*map(_owners, hooks)) - {None}


def retire_older(parameters: Iterable[Tensor]) -> None:
    """Parameters that are wrapped again are averaged by the new wrapper alone."""
    mine = set(parameters)
    for older in owners_of_hooks(mine):
        if {slot.parameter for slot in older.layout.slots} <= mine:
            older.retire()


def is_marked(tensor: Tensor, owner: object) -> bool:
    """Whether ``tensor`` has a hook already that calls a method of ``owner``."""
    return owner in _owners(tensor._backward_hooks)


def _owners(hooks: Mapping[int, Any] | None) -> set[Any]:
    marks = (getattr(hook, "owner", None) for hook in (hooks or {}).values())
    return {owner() for owner in marks if isinstance(owner, weakref.ref)}


def at_end_of_backward(finished: Callable[..., None], failed: Callable[..., None], argument: object) -> None:
    """Call ``finished(argument)`` when the running graph task completes, ``failed(argument)`` if it fails.

    Must be called from inside a backward. Neither callback keeps its object alive.

    Note "how a failed backward is seen": the callback is owned by the graph task. When backward
    raises, the task is destroyed and with it the callback, uncalled; its finalizer is the one
    place that hears of it in time.
    """
    end = _EndOfBackward(WeakCall(finished, argument), WeakCall(failed, argument))
    Variable._execution_engine.queue_callback(end)


@interpreted
class _EndOfBackward:
    def __init__(self, finished: Callable[[], None], failed: Callable[[], None]) -> None:
        self._finished = finished
        self._failed = failed
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._finished()

    def __del__(self) -> None:
        if not self._called:
            self._failed()
