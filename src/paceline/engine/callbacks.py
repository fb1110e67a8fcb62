"""How autograd calls the reducer without keeping it alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.autograd import Variable

from paceline.comm.interpreted import interpreted


def call_weakly(method: Callable[..., None], *bound: Any) -> Callable[..., None]:
    """The bound method as a callback that does nothing once its object is gone.

    Args:
        method: a bound method.
        bound: passed to it in place of what the caller passes, if given.
    """
    owner = weakref.ref(method.__self__)  # type: ignore[attr-defined]
    function = method.__func__  # type: ignore[attr-defined]

    @interpreted
    def call_with_what_comes(*arguments: Any) -> None:
        alive = owner()
        if alive is not None:
            function(alive, *arguments)

    @interpreted
    def call_with_bound(*_: Any) -> None:  # for every parameter in every backward: no line more than needed
        alive = owner()
        if alive is not None:
            function(alive, *bound)

    call = call_with_bound if bound else call_with_what_comes
    call.owner = owner  # type: ignore[attr-defined]  # for `owners_of_hooks`
    return call


def owners_of_hooks(parameters: Iterable[Tensor]) -> set[Any]:
    """The objects whose methods ``call_weakly`` has put on these parameters, as far as they live."""
    hooks = (parameter._post_accumulate_grad_hooks for parameter in parameters)
    return set().union(*map(_owners, hooks)) - {None}


def retire_older(parameters: Iterable[Tensor]) -> None:
    """Parameters that are wrapped again are averaged by the new wrapper alone."""
    mine = set(parameters)
    for older in owners_of_hooks(mine):
        if {slot.parameter for slot in older.layout.slots} <= mine:
            older.retire()


def is_marked(tensor: Tensor, owner: object) -> bool:
    """Whether ``tensor`` has a hook already that ``call_weakly`` made of a method of ``owner``."""
    return owner in _owners(tensor._backward_hooks)


def _owners(hooks: Mapping[int, Any] | None) -> set[Any]:
    return {hook.owner() for hook in (hooks or {}).values() if hasattr(hook, "owner")}


def at_end_of_backward(finished: Callable[..., None], failed: Callable[..., None], argument: object) -> None:
    """Call ``finished(argument)`` when the running graph task completes, ``failed(argument)`` if it fails.

    Must be called from inside a backward. Neither callback keeps its object alive.

    Note "how a failed backward is seen": the callback is owned by the graph task. When backward
    raises, the task is destroyed and with it the callback, uncalled; its finalizer is the one
    place that hears of it in time.
    """
    end = _EndOfBackward(call_weakly(finished), call_weakly(failed), argument)
    Variable._execution_engine.queue_callback(end)


@interpreted
class _EndOfBackward:
    def __init__(self, finished: Callable[..., None], failed: Callable[..., None], argument: object) -> None:
        self._finished = finished
        self._failed = failed
        self._argument = argument
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._finished(self._argument)

    def __del__(self) -> None:
        if not self._called:
            self._failed(self._argument)
