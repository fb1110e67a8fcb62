"""What a rank that ends by an uncaught exception tells the others.

They will find it gone, and can then say why. Wherever the exception was raised, the
interpreter keeps it in ``sys.last_value`` once it was printed, and before exit handlers run.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys

import torch.distributed as dist

from paceline.comm.job_store import store_of_job
from paceline.recorder.ring import recorder


def leave_word_of_uncaught_exceptions() -> None:
    """From now on, tell the others of the exception by which this process ends."""
    _leave_word_at_exit(os.getpid())


@functools.cache
def _leave_word_at_exit(pid: int) -> None:  # once for a process, and anew in one that was forked
    atexit.register(_leave_word, pid)


def _leave_word(pid: int) -> None:
    error = getattr(sys, "last_value", None)
    if error is not None and os.getpid() == pid and dist.is_initialized():
        recorder().raised(in_words(error))
        with contextlib.suppress(RuntimeError):  # the store's host may be gone before us
            store_of_job().set(exception_key(dist.get_rank()), in_words(error))


def exception_key(rank: int) -> str:
    """Where in the job's store the exception of a rank is told."""
    return f"exception/{rank}"


def in_words(error: BaseException) -> str:
    """An exception as the others print it."""
    return f"{type(error).__name__}: {error}"
