"""A rank leaves the interpreter only when no thread of Gloo is on its way back into it.

A work of Gloo that was started once a backward had run holds Python's context, and so do the callbacks
of its future. Gloo's thread lets go of them after the ranks that waited were told, so a script may end
first. A thread that asks for the interpreter while that shuts down is ended where it stands, and in the
middle of C++ this aborts the process: "terminate called without an active exception".

A group whose last owner is the Reducer of torch's own DDP is worse off. After ``destroy_process_group`` it
goes when the wrapper does, and waits for Gloo's threads with the interpreter's lock in hand. A thread that
still needs the lock, to let go of a tensor that was gathered, is waited for for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_S = 1.0  # before the process ends
_GROUPS_PATIENCE_S = 10.0  # before groups end, which may then take for ever
_LOOK_S = 0.002
_THREADS = Path("/proc/self/task")
_NAME = "pt_gloo_runloop"
_DESTROY, _MARK = "destroy_process_group", "_paceline_waits_for_gloo"


def let_gloo_rest_before_leaving() -> None:
    """From now on, wait at the end of this process until Gloo's threads rest, a second at most."""
    _at_exit(os.getpid())


@functools.cache
def _at_exit(pid: int) -> None:  # once for a process, and anew in one that was forked
    atexit.register(_wait_until_gloo_rests, PATIENCE_S)


def let_gloo_rest_before_groups_end() -> None:
    """From now on ``destroy_process_group`` waits until Gloo's threads rest, some seconds at most.

    It replaces the function in both places where a script may find it, so this is for processes that paceline
    started; ``torch.distributed`` has been imported.
    """
    for name in ("torch.distributed", "torch.distributed.distributed_c10d"):
        module = sys.modules.get(name)
        destroy = getattr(module, _DESTROY, None)
        if destroy is not None and not hasattr(destroy, _MARK):
            setattr(module, _DESTROY, _after_rest(destroy))


def _after_rest(destroy: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(destroy)
    def destroy_process_group(*arguments: Any, **named: Any) -> None:
        _wait_until_gloo_rests(_GROUPS_PATIENCE_S)
        destroy(*arguments, **named)

    setattr(destroy_process_group, _MARK, True)
    return destroy_process_group


def _wait_until_gloo_rests(patience: float) -> None:
    """Until all threads of Gloo slept from one look to the next.

    While we sleep the interpreter is free, so a thread that waits for it runs, and is seen to have.
    """
    end = time.monotonic() + patience
    seen = _sleeps_of_gloo()
    while seen and time.monotonic() < end:
        time.sleep(_LOOK_S)
        before, seen = seen, _sleeps_of_gloo()
        if seen == before and None not in seen.values():
            return


def _sleeps_of_gloo() -> dict[str, str | None]:
    """For each thread how often it has gone to sleep, None for one that is awake.

    Empty where there is no /proc.
    """
    found = {}
    for thread in _THREADS.glob("*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if (thread / "comm").read_text().strip() == _NAME:
                status = (thread / "status").read_text()
                asleep = "State:\tS" in status
                found[thread.name] = status.partition("voluntary_ctxt_switches:")[2] if asleep else None
    return found
