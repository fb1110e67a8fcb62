"""Lines of code on a thread's stack: which of them is the user's, and what goes on below it.

The user's line is the innermost that lies neither in PyTorch, paceline, the standard library nor any
installed package. Lists of places are ordered outwards, the innermost first.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType

COLLECTIVE, BACKWARD = "a collective", "backward"

# Parts of a path -> what is going on below such a line; the innermost that fits counts.
_DOING = (
    ("/torch/utils/data/", "data loading"),
    ("/paceline/train/feeds.py", "data loading"),
    ("/torch/distributed/distributed_c10d.py", COLLECTIVE),
    ("/torch/distributed/utils.py", COLLECTIVE),
    ("/paceline/comm/", COLLECTIVE),
    ("/torch/autograd/", BACKWARD),
    ("/torch/optim/", "the optimizer"),
    ("/paceline/checkpoint/", "a checkpoint"),
    ("/torch/serialization.py", "saving or loading a file"),
    ("/torch/nn/modules/", "a module's forward"),
)
_CALLS = "/torch/distributed/distributed_c10d.py"  # whose outermost function is the one that was called
_WRITTEN = re.compile(r'\s*File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)')


@dataclass(frozen=True)
class Place:
    """A line on a stack.

    Attributes:
        path: of the file.
        line: number of the line.
        name: of the function.
        moment: which call of the function it is, and which of its instructions.
    """

    path: str
    line: int
    name: str
    moment: tuple[int, int] = (0, 0)


def outwards(frame: FrameType | None) -> list[Place]:
    """The places of a running thread."""
    found = []
    while frame is not None:
        found.append(_place(frame, frame.f_lineno, frame.f_lasti))
        frame = frame.f_back
    return found


def of_traceback(trace: TracebackType | None) -> list[Place]:
    """The places an exception went through."""
    found = []
    while trace is not None:
        found.append(_place(trace.tb_frame, trace.tb_lineno, trace.tb_lasti))
        trace = trace.tb_next
    return found[::-1]


def of_written_stack(lines: Sequence[str]) -> list[Place]:
    """The places of a stack as ``faulthandler`` writes it."""
    found = filter(None, map(_WRITTEN.fullmatch, lines))
    return [Place(match["path"], int(match["line"]), match["name"]) for match in found]


def users(places: Sequence[Place]) -> Place:
    """The innermost place that is the user's; else the innermost of no machinery; else the innermost."""
    others = [place for place in places if not place.path.startswith(_machinery())]
    mine = [place for place in others if not place.path.startswith(_folders_of_others())]
    return [*mine, *others, *places][0]


def innermost(places: Sequence[Place]) -> Place:
    """The innermost place that has a file."""
    return next((place for place in places if not place.path.startswith("<")), places[0])


def doing(places: Sequence[Place]) -> str:
    """What goes on there, as "data loading" or "a collective (all_reduce)"; may be empty."""
    for place in places:
        for part, words in _DOING:
            if part in place.path:
                called = [each.name for each in places if _CALLS in each.path] if words == COLLECTIVE else []
                return f"{words} ({called[-1]})" if called else words
    return ""


def line_of(place: Place, parents: int = 0) -> str:
    """As ``train.py:41 in load``, with as many of the folders as are asked for."""
    path = "/".join(place.path.split(os.sep)[-1 - parents :])
    where = f"{path}:{place.line}"
    return where if place.name == "<module>" else f"{where} in {place.name}"


def _place(frame: FrameType, line: int, instruction: int) -> Place:
    return Place(frame.f_code.co_filename, line, frame.f_code.co_name, (id(frame), instruction))


def _machinery() -> tuple[str, ...]:
    """Where code lies of which a rank's line tells little, even where all of the code is installed."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    paceline = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    folders = [paceline, *([os.path.dirname(torch)] if torch else [])]
    return ("<", *(f"{folder}{os.sep}" for folder in folders))


@functools.cache
def _folders_of_others() -> tuple[str, ...]:
    """Where code lies that the user did not write."""
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {os.path.dirname(os.__file__)}
    return tuple(f"{path}{os.sep}" for path in paths if path)
