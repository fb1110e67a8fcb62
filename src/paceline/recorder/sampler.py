"""Where the main thread stands, looked at once a second and written into the record.

    {"line": "train.py:41 in load", "since": 5003.2, "doing": "data loading", "asleep": true,
     "inner": "torch/utils/data/dataloader.py:1295 in _try_get_data"}

The line is the user's: the innermost frame that lies neither in PyTorch, paceline, the standard library
nor any installed package. A rank that is stopped or killed later can therefore still be said to have
stood in its data loading for so many seconds.

Note "standing or coming by again": that a line is the same in two looks may mean either. A thread that
used no processor time between them has stood; where the recorder has newer facts, it has moved on.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from types import FrameType

from paceline.recorder.layout import WHERE_AT, write_text

PERIOD_S = 1.0
THREAD_NAME = "paceline-sampler"
_ASLEEP_BELOW = 0.1  # share of the time that a thread that "sleeps" may spend computing

# Parts of a path -> what is going on below such a frame; the innermost that fits counts.
_DOING = (
    ("/torch/utils/data/", "data loading"),
    ("/paceline/train/feeds.py", "data loading"),
    ("/torch/distributed/distributed_c10d.py", "a collective"),
    ("/paceline/comm/", "a collective"),
    ("/torch/autograd/", "backward"),
    ("/torch/optim/", "the optimizer"),
    ("/paceline/checkpoint/", "a checkpoint"),
    ("/torch/serialization.py", "saving or loading a file"),
    ("/torch/nn/modules/", "a module's forward"),
)


def start_sampler(memory: mmap.mmap) -> None:
    """Start looking at the main thread, unless somebody in this process already does.

    Args:
        memory: this process's record.
    """
    if all(thread.name != THREAD_NAME for thread in threading.enumerate()):
        look = _Look(memory)
        threading.Thread(target=look.forever, name=THREAD_NAME, daemon=True).start()


class _Look:
    """Looks at the main thread, and remembers since when it stands where it does."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._main = threading.main_thread()
        self._number = 0
        self._place: object = None
        self._since = time.monotonic()
        self._used_before = self._processor_time()
        self._elsewhere = _folders_of_others()
        self._paceline = f"{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}{os.sep}"

    def forever(self) -> None:
        if hasattr(signal, "pthread_sigmask"):  # signals are for the main thread, which may wait for one
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while self._main.is_alive():
            self.once()
            time.sleep(PERIOD_S)

    def once(self) -> None:
        """Look, and write down what is seen."""
        frame = sys._current_frames().get(self._main.ident or 0)
        if frame is None:
            return
        frames = list(_outwards(frame))
        innermost = next((each for each in frames if not each.f_code.co_filename.startswith("<")), frame)
        mine = self._users(frames)
        place = (id(mine), mine.f_lasti)
        now, used = time.monotonic(), self._processor_time()
        if place != self._place:
            self._place, self._since, self._used_before = place, now, used
        stood = now - self._since
        seen = {
            "line": _line_of(mine),
            "inner": "" if mine is innermost else _line_of(innermost, parents=2),
            "doing": _doing(frames),
            "since": self._since,
            "asleep": stood > 0 and used - self._used_before < _ASLEEP_BELOW * stood,
        }
        self._number += 1
        write_text(self._memory, WHERE_AT, self._number, json.dumps(seen))

    def _users(self, frames: list[FrameType]) -> FrameType:
        """The innermost frame that is the user's; else the innermost of no machinery; else the innermost."""
        machinery = ("<", self._paceline, *_folder_of("torch"))
        others = [frame for frame in frames if not frame.f_code.co_filename.startswith(machinery)]
        users = [frame for frame in others if not frame.f_code.co_filename.startswith(self._elsewhere)]
        return [*users, *others, *frames][0]

    def _processor_time(self) -> float:
        """Seconds of processor time that the main thread has used; grows with the clock if unknown."""
        if not hasattr(time, "pthread_getcpuclockid") or not self._main.is_alive():
            return time.monotonic()
        return time.clock_gettime(time.pthread_getcpuclockid(self._main.ident or 0))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _folders_of_others() -> tuple[str, ...]:
    """Where code lies that the user did not write."""
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {os.path.dirname(os.__file__)}
    return tuple(f"{path}{os.sep}" for path in paths if path)


def _folder_of(package: str) -> list[str]:
    """Where a package lies, if it is imported."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return [f"{os.path.dirname(file)}{os.sep}"] if file else []


def _doing(frames: list[FrameType]) -> str:
    for frame in frames:
        path = frame.f_code.co_filename
        for part, words in _DOING:
            if part in path:
                return words
    return ""


def _line_of(frame: FrameType, parents: int = 0) -> str:
    """As ``train.py:41 in load``, with as many of the folders as are asked for."""
    code = frame.f_code
    path = "/".join(code.co_filename.split(os.sep)[-1 - parents :])
    place = f"{path}:{frame.f_lineno}"
    return place if code.co_name == "<module>" else f"{place} in {code.co_name}"
