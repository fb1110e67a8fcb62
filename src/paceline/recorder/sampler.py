"""Where the main thread stands, looked at once a second and written into the record.

    {"line": "train.py:41 in load", "since": 5003.2, "doing": "data loading", "asleep": true,
     "inner": "torch/utils/data/dataloader.py:1295 in _try_get_data", "looked": 5044.2, "still": 5003.2}

The line is the user's (``places.py``). A rank that is stopped or killed later can therefore still be said to
have stood in its data loading for so many seconds. The line that raised the exception which ended the script
is the last to be written. A script that ended otherwise leaves its last line as well, and beside it is said
since when the interpreter has been shutting down, and what it waits for there.

Note "standing or coming by again": that a line is the same in two looks may mean either. A thread that
used no processor time between them has stood; where the recorder has newer facts, it has moved on.
``still`` says since when it has used none at all: not one instruction was run since then.
"""

from __future__ import annotations

import json
import mmap
import signal
import sys
import threading
import time
from types import TracebackType
from typing import Any

from paceline.recorder.groups import collective_group
from paceline.recorder.layout import WHERE_AT, write_text
from paceline.recorder.places import Place, doing, innermost, line_of, of_traceback, outwards, users

PERIOD_S = 1.0
THREAD_NAME = "paceline-sampler"
_ASLEEP_BELOW = 0.1  # share of the time that a thread that "sleeps" may spend computing


def start_sampler(memory: mmap.mmap) -> Look | None:
    """Start looking at the main thread, unless somebody in this process already does.

    Args:
        memory: this process's record.

    Returns:
        What looks; None when somebody else does.
    """
    if any(thread.name == THREAD_NAME for thread in threading.enumerate()):
        return None
    look = Look(memory)
    threading.Thread(target=look.forever, name=THREAD_NAME, daemon=True).start()
    return look


class Look:
    """Looks at the main thread, and remembers since when it stands where it does."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._main = threading.main_thread()
        self._writing = threading.Lock()
        self._number = 0
        self._moment: tuple[int, int] | None = None
        self._since = time.monotonic()
        self._used_before = self._used_last = self._processor_time()
        self._still_since = self._since
        self._seen: dict[str, object] = {}
        self._raised = False
        self._over = 0.0

    def forever(self) -> None:
        """Look once a second, from a second after the start on."""
        if hasattr(signal, "pthread_sigmask"):  # signals are for the main thread, which may wait for one
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:  # while exit handlers run as well; the interpreter's end is this daemon's
            time.sleep(PERIOD_S)
            self.once()

    def once(self) -> None:
        """Look, and write down what is seen."""
        frame = sys._current_frames().get(self._main.ident or 0)
        if frame is None:
            return
        with self._writing:
            if self._over:
                self._write({**self._seen, "over": self._over, "leaving": _leaving(outwards(frame))})
            elif not self._raised and self._main.is_alive():  # else an end that nobody told of
                self._see(outwards(frame), collective_group(frame))

    def script_is_over(self, trace: TracebackType | None) -> None:
        """The script ended, and from now on the interpreter shuts down. Called in the main thread.

        Args:
            trace: of the exception that ended it, if it ended badly.
        """
        with self._writing:
            if trace is not None:
                self._see(of_traceback(trace), {})
                self._raised = True
            else:
                self._over = time.monotonic()
                self._write({**self._seen, "over": self._over})

    def _see(self, places: list[Place], group: dict[str, Any]) -> None:
        mine, inner = users(places), innermost(places)
        now, used = time.monotonic(), self._processor_time()
        if used != self._used_last:
            self._used_last, self._still_since = used, now
        if mine.moment != self._moment:
            self._moment, self._since, self._used_before = mine.moment, now, used
        stood = now - self._since
        self._seen = {
            "line": line_of(mine),
            "inner": "" if mine is inner else line_of(inner, parents=2),
            "doing": doing(places),
            "since": self._since,
            "asleep": stood > 0 and used - self._used_before < _ASLEEP_BELOW * stood,
            "looked": now,
            "still": self._still_since,
            **group,
        }
        self._write(self._seen)

    def _write(self, seen: dict[str, object]) -> None:
        self._number += 1
        write_text(self._memory, WHERE_AT, self._number, json.dumps(seen))

    def _processor_time(self) -> float:
        """Seconds of processor time that the main thread has used; grows with the clock if unknown."""
        if not hasattr(time, "pthread_getcpuclockid") or not self._main.is_alive():
            return time.monotonic()
        return time.clock_gettime(time.pthread_getcpuclockid(self._main.ident or 0))


def _leaving(places: list[Place]) -> str:
    """What the main thread waits for after the script: threads, processes, or an exit handler."""
    if any(place.path == threading.__file__ and place.name == "_shutdown" for place in places):
        mine = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
        return f"waiting for its {'threads' if len(mine) > 1 else 'thread'} {', '.join(mine[:3])}"
    if any("/multiprocessing/util.py" in place.path and place.name == "_exit_function" for place in places):
        return "waiting for processes that it started with multiprocessing"
    return f"in an exit handler at {line_of(users(places))}"
