"""Which process group a collective that is under way is of, read from the frame that called it."""

from __future__ import annotations

import contextlib
import sys
from types import FrameType
from typing import Any

_CALLS = "/torch/distributed/distributed_c10d.py"
_MOST_MEMBERS = 32  # of a group that is written down with its ranks


def collective_group(frame: FrameType | None) -> dict[str, Any]:
    """The process group in whose collective a thread stands.

    Args:
        frame: the innermost of the thread.

    Returns:
        ``group``, its name, the same on all its ranks; ``members``, its ranks in the job, none where they are
        many; ``patience``, the timeout of the job's default group in seconds, 0 where that is not known.
        Nothing where the thread is in no collective of torch.distributed.
    """
    while frame is not None and not (_CALLS in frame.f_code.co_filename and _takes_group(frame)):
        frame = frame.f_back
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if frame is None or c10d is None or not c10d.is_initialized():
        return {}
    try:
        group = frame.f_locals.get("group") or c10d.group.WORLD
        members = list(c10d.get_process_group_ranks(group))
        told = members if len(members) <= _MOST_MEMBERS else []
        return {"group": str(group.group_name), "members": told, "patience": _timeout(c10d.group.WORLD)}
    except Exception:  # no group, or one that another thread has just ended: there is nothing to tell
        return {}


def _takes_group(frame: FrameType) -> bool:
    code = frame.f_code
    return "group" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _timeout(group: Any) -> float:
    """Of a group, in seconds; 0 where its backend does not tell."""
    for device in group._device_types:
        with contextlib.suppress(AttributeError, RuntimeError):
            return float(group._get_backend(device).options._timeout.total_seconds())
    return 0.0
