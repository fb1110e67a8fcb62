"""What a started process does between fork and exec: ask to be killed when the launcher dies.

The kernel sends SIGKILL when the thread that started it ends (PR_SET_PDEATHSIG), so whatever is on
the leash must be started from the launcher's main thread, which lives as long as the launcher.
Whoever was orphaned before the leash was on notices by its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def leash() -> Callable[[], None] | None:
    """For ``preexec_fn``; None where the kernel has no such thing."""
    if sys.platform != "linux":
        return None
    prctl, launcher = ctypes.CDLL(None).prctl, os.getpid()

    def die_with_launcher() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:
            os._exit(1)

    return die_with_launcher
