"""The recorder of this process: facts, in the order in which they happen.

    recorder().add(Kind.BACKWARD, count=118)
    with recorder().waiting:
        ...                                     # for other ranks

It is on where a launcher named a folder for it, or the user did: ``PACELINE_RECORDS=runs/mine``
(``environment.record_folder``). Elsewhere ``recorder()`` is an object whose methods do nothing.

Note "a fork is no rank": workers that load data are forked from the rank and may well run what records.
A forked child therefore goes on in memory of its own, which nobody reads.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import weakref
from collections.abc import Callable, Hashable
from pathlib import Path
from threading import get_ident
from time import monotonic
from types import TracebackType

from paceline import environment
from paceline.recorder.layout import (
    FACT,
    FACT_BYTES,
    FILE_BYTES,
    NAMES_SUFFIX,
    RING_AT,
    RING_FACTS,
    WORDS_AT,
    Kind,
    open_file,
    write_header,
    write_text,
)
from paceline.recorder.sampler import start_sampler
from paceline.recorder.stacks import STACKS_SUFFIX, write_stacks_to

_LONGEST_ERROR = 500  # characters of an exception's text
_MOST_NAMES = 100_000  # a run that makes up new names for ever does not fill the disk


@functools.cache
def recorder() -> Recorder:
    """This process's recorder; opened at the first call."""
    opened = _open()
    if opened is None:
        return SilentRecorder()
    memory, names = opened
    start_sampler(memory)
    return Recorder(memory, names)


def observe() -> Callable[[TracebackType | None], None]:
    """Record where this rank's main thread stands, whether or not anything else is recorded later.

    Returns:
        To be called when the script is over, with the traceback of the exception that ended it, if any.
    """
    opened = _open()
    if opened is None:
        return lambda trace: None
    memory, names = opened
    write_stacks_to(names.with_suffix(STACKS_SUFFIX))
    look = start_sampler(memory)
    return look.script_is_over if look is not None else lambda trace: None


def _open() -> tuple[mmap.mmap, Path] | None:
    """This process's record and the file of its names; None when there is to be none."""
    folder = environment.record_folder()
    if folder is None:
        return None
    place = environment.rank_place() if environment.launched() else None
    identity = f"rank_{place.rank}" if place is not None else f"process_{os.getpid()}"
    rank, world_size = (place.rank, place.world_size) if place is not None else (None, 0)
    memory = open_file(Path(folder), identity, rank, world_size)
    return None if memory is None else (memory, Path(folder) / f"{identity}{NAMES_SUFFIX}")


class Recorder:
    """Writes facts into a mapped file; see ``layout.py``. Any thread may.

    Args:
        memory: the file.
        names: where the texts go that facts refer to.

    Attributes:
        step: the optimizer step that is under way, counted from 1; 0 where nobody counts them.
        micro_batch: its micro-batch, counted from 1.
        waiting: a context around a wait for other ranks.
        path: of the file; empty when nothing is recorded.
    """

    def __init__(self, memory: mmap.mmap | bytearray, names: Path) -> None:
        self.step = self.micro_batch = 0
        self.waiting: Waiting | NotWaiting = Waiting(self)
        self.path = str(names.with_suffix(".record"))
        self._memory = memory
        self._numbers, self._texts = itertools.count(1), itertools.count(1)
        self._names: dict[str, int] = {}
        self._things: dict[Hashable, int] = {}
        self._names_file: int | None = os.open(
            names, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        _forget_in_children(self)

    def add(self, kind: Kind, count: int = 0, name: int = 0, size: int = 0) -> None:
        """Write a fact.

        Args:
            kind: what happened.
            count: a number that belongs to it, see ``Kind``.
            name: from ``name``.
            size: another number, see ``Kind``.
        """
        number = next(self._numbers)  # atomic: threads get different ones
        at = RING_AT + number % RING_FACTS * FACT_BYTES
        FACT.pack_into(self._memory, at, number, monotonic(), kind, self.micro_batch, self.step,
                       name, 0, count, size, 0, number)  # fmt: skip

    def name(self, text: str) -> int:
        """A number for a text, which is written down at its first use."""
        known = self._names.get(text)
        if known is None:
            known = self._names[text] = self._write_name(text)
        return known

    def name_of(self, thing: Hashable, words: Callable[[], str]) -> int:
        """A number for the text that ``words`` gives for a thing; called at the thing's first use."""
        known = self._things.get(thing)
        if known is None:
            known = self._things[thing] = self.name(words())
        return known

    def phase(self, words: str) -> None:
        """Write the fact that a part of training begins."""
        self.add(Kind.PHASE, name=self.name(words))

    def raised(self, text: str) -> None:
        """Write the fact that an exception left a part of training."""
        self.add(Kind.RAISED, name=self.name(text[:_LONGEST_ERROR]))

    def say(self, words: str) -> None:
        """Say what the wait that is under way is for; called when it takes long."""
        write_text(self._memory, WORDS_AT, next(self._texts), words)

    def introduce(self, rank: int, world_size: int) -> None:
        """Say which rank this is, where no launcher did."""
        if isinstance(self._memory, mmap.mmap) and not environment.launched():
            write_header(self._memory, rank, world_size)

    def forget(self) -> None:
        """Go on in memory that nobody reads."""
        self._memory = bytearray(FILE_BYTES)
        if self._names_file is not None:
            os.close(self._names_file)
            self._names_file = None

    def _write_name(self, text: str) -> int:
        number = len(self._names) + 1
        if self._names_file is None or number > _MOST_NAMES:
            return 0
        line = f"{number} {' '.join(text.split())}\n".encode(errors="replace")
        try:
            os.write(self._names_file, line)
        except OSError:  # the disk is full: what is recorded goes on without its name
            return 0
        return number


class SilentRecorder(Recorder):
    """Records nothing."""

    def __init__(self) -> None:
        self.step = self.micro_batch = 0
        self.waiting = NotWaiting()
        self.path = ""

    def add(self, kind: Kind, count: int = 0, name: int = 0, size: int = 0) -> None:
        pass

    def name(self, text: str) -> int:
        return 0

    def name_of(self, thing: Hashable, words: Callable[[], str]) -> int:
        return 0

    def phase(self, words: str) -> None:
        pass

    def raised(self, text: str) -> None:
        pass

    def say(self, words: str) -> None:
        pass

    def introduce(self, rank: int, world_size: int) -> None:
        pass

    def forget(self) -> None:
        pass


class Waiting:
    """A wait for other ranks, within another one as well: the outermost is recorded.

    Only in the thread that trains, which is the one that made the recorder: process groups wait in threads
    of their own while that one goes on.
    """

    def __init__(self, owner: Recorder) -> None:
        self._add = owner.add
        self._thread = get_ident()
        self._depth = 0
        self._began = 0.0
        self._total = 0.0

    def __enter__(self) -> None:
        if get_ident() == self._thread:
            self._depth += 1
            if self._depth == 1:
                self._began = monotonic()
                self._add(Kind.WAIT)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if get_ident() != self._thread:
            return
        self._depth -= 1
        if self._depth == 0:
            self._total += monotonic() - self._began
            ended = Kind.WAIT_ENDED if kind is None else Kind.WAIT_FAILED
            self._add(ended, 0, 0, int(self._total * 1e6))


class NotWaiting:
    """The wait of a rank that records nothing."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def _forget_in_children(recorder: Recorder) -> None:
    alive = weakref.ref(recorder)

    def in_child() -> None:
        mine = alive()
        if mine is not None:
            mine.forget()

    os.register_at_fork(after_in_child=in_child)
