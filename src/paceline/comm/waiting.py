"""Waiting for a collective without being stuck, and saying who did not come.

Note "a blocked wait blocks everything": while Gloo waits inside one call, Python signal
handlers do not run, and aborting the group does not free the call. Waiting in slices
leaves the collective whole (a slice that ends early raises "timed out" and nothing else
happens) and lets handlers run in between.

Between slices it also looks at the other ranks: a rank that is not a neighbour in the
group's ring would learn of a death only through its timeout.

Note "who is missing": a group's own error names a socket or nobody. So a rank that has
waited for a while writes what for into the job's store, and withdraws it afterwards. When
the wait fails, the ranks that did not write are the ones that did not come; if all did, they
wait for different things. Of those on the same host we also see whether their process is
still there. What a rank writes of itself holds in all its groups, so it is kept once for the
job, under its rank in the whole job; and that is the rank that messages name.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from paceline.comm.causes import Cause
from paceline.comm.job_store import store_of_job
from paceline.comm.last_words import exception_key, in_words, leave_word_of_uncaught_exceptions
from paceline.comm.leaving import let_gloo_rest_before_leaving
from paceline.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    CommunicationError,
    PeerFailedError,
    PeerLostError,
)
from paceline.recorder.reading import read_state
from paceline.recorder.ring import recorder
from paceline.recorder.words import whereabouts

SLICE = datetime.timedelta(seconds=0.2)
DEATH_GRACE_S = 1.0  # how long a connection may be broken before the process behind it is gone
STORE_PATIENCE_S = 2.0
POLL_S = 0.05
# What Gloo says when a rank did not come: of the operation that waited for it, and of those behind it.
_TIMEOUT = re.compile("timed out|application timeout", re.I)
# What process groups say when another rank is behind an error, and not the collective itself.
_CONNECTION = re.compile("connection|socket|peer|broken pipe|read error|write error|network|remote", re.I)


@dataclass(frozen=True)
class Seat:
    """Where a rank's process runs, and where its record is, if it keeps one."""

    host: str
    pid: int
    record: str = ""


class Peers:
    """The other ranks of a group, seen through what they write into a store.

    Args:
        group: the process group.

    Attributes:
        group: the process group.
        rank: this rank within the group.
        world_size: number of ranks of the group.
        global_rank: this rank within the whole job, which is what messages name.
        waited_s: seconds that this rank has waited for collectives so far, here.
        between_slices: called while this rank waits, and when a wait has failed; what it raises is the error.

    Raises:
        ArgumentError: this rank is not one of the group's.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ArgumentError(
                f"rank {dist.get_rank()} is not in this process group: only its members may use it"
            )
        self.world_size = dist.get_world_size(group)
        self.global_rank = dist.get_global_rank(group, self.rank)
        self._ranks = dist.get_process_group_ranks(group)
        self._store = dist.PrefixStore("paceline/peers", _get_process_group_store(group))
        self._job_store = store_of_job()
        self._store_answers = True
        self._told_exception = False
        self._known_neighbours: dict[int, Seat] | None = None
        self.waited_s = 0.0
        self.between_slices: Callable[[], None] = lambda: None
        self._recorder = recorder()
        if self.world_size > 1:
            self._recorder.introduce(self.global_rank, dist.get_world_size())
            seat = [_host_identity(), os.getpid(), self._recorder.path]
            self._job_store.set(f"seat/{self.global_rank}", json.dumps(seat))
            let_gloo_rest_before_leaving()
            leave_word_of_uncaught_exceptions()

    def in_job(self, ranks: Iterable[int]) -> list[int]:
        """Ranks of the group, as ranks of the whole job."""
        return [self._ranks[rank] for rank in ranks]

    def run(self, start: Callable[[], dist.Work], device: torch.device, what: Callable[[], str]) -> None:
        """Start a collective and wait for it.

        Args:
            start: issues it with ``async_op=True``.
            device: of its tensors. On an accelerator the current stream waits, and the CPU does not.
            what: gives the words for what is being waited for, called only when they are needed.

        Raises:
            CommunicationError: as ``wait``.
        """
        try:
            work = start()
        except RuntimeError as error:
            raise self.explain(error, what()) from error
        if device.type == "cpu":
            self.wait(work, what)
        else:
            work.wait()

    def wait(self, work: dist.Work, what: Callable[[], str]) -> None:
        """Wait for ``work`` on a CPU group, in slices, until it is done or failed.

        Args:
            work: a collective in flight.
            what: gives the words for what is being waited for, called only when they are needed.

        Raises:
            CollectiveTimeoutError: some rank did not come within the group's timeout; it is named.
            PeerLostError: some rank's process is gone; it is named.
            CommunicationError: the collective failed for another reason.
        """
        self._wait(functools.partial(_wait_slice, work), what)

    def wait_for_value(self, future: torch.futures.Future[Any], what: Callable[[], str]) -> None:
        """The same for a future on the CPU, such as a communication hook's.

        Raises:
            CommunicationError: as ``wait``.
        """
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        self._wait(lambda: done.wait(SLICE.total_seconds()), what)
        try:
            future.wait()
        except RuntimeError as error:
            raise self.explain(error, what()) from error

    def _wait(self, wait_slice: Callable[[], bool], what: Callable[[], str]) -> None:
        began = time.perf_counter()
        try:
            with self._recorder.waiting:
                if self._explained(wait_slice, what):
                    return
                with self._standing_in_line(what()):
                    while not self._explained(wait_slice, what):
                        self._look_around(what())
        finally:
            self.waited_s += time.perf_counter() - began

    def explain(self, error: RuntimeError, what: str) -> CommunicationError:
        """Turn a group's error into one that names the ranks behind it.

        Args:
            error: what the process group raised.
            what: what this rank was waiting for.
        """
        if isinstance(error, CommunicationError):  # the group knows the ranks itself
            because = f", because {error.reason}" if error.reason else ""
            left = self.last_words_of(error.ranks) + self._last_seen(error.ranks)
            text = f"rank {self.global_rank}: {what} failed{because}.{left} The process group said: {error}"
            return type(error)(text)
        self.between_slices()  # a rank may have said why before it left
        timed_out = _TIMEOUT.search(str(error)) is not None
        cause = self._cause_told_by_others()
        if cause is None and timed_out:
            cause = self._cause_of_silence("absent", what)
        elif cause is None:
            lost = self._lost_ranks(patience_s=DEATH_GRACE_S)
            if not lost and not _CONNECTION.search(str(error)):
                return CommunicationError(
                    f"rank {self.global_rank}: {what} failed in the process group: {error}"
                )
            cause = Cause("lost", lost) if lost else self._cause_of_silence("left", what)
        return self._failure(cause, what, f" The process group said: {_first_line(error)}")

    def _explained(self, wait_slice: Callable[[], bool], what: Callable[[], str]) -> bool:
        try:
            return wait_slice()
        except RuntimeError as error:
            raise self.explain(error, what()) from error

    def _look_around(self, what: str) -> None:
        """Raise if another rank is gone, or has told why it gave up."""
        lost = self._lost_ranks(patience_s=0.0)
        cause = self._cause_told_by_others() or (Cause("lost", lost) if lost else None)
        if cause is not None:
            raise self._failure(cause, what)
        self.between_slices()

    def exchange(self, key: str, mine: str, what: str, timeout: datetime.timedelta) -> list[str]:
        """Every rank's text, by rank within the group: for what must be known before a collective is issued.

        Args:
            key: the same on all ranks, and used once.
            mine: this rank's text.
            what: says in an error what the exchange is for.
            timeout: how long to wait for the last rank.

        Raises:
            CommunicationError: a rank did not come, or is gone; it is named.
        """
        self.announce(key, mine)
        deadline = time.monotonic() + timeout.total_seconds()
        with self._standing_in_line(what):
            while True:
                answers = [self._read(f"{key}/{rank}") for rank in range(self.world_size)]
                texts = [answer for answer in answers if answer is not None]
                if len(texts) == self.world_size:
                    return texts
                self._look_around(what)
                if time.monotonic() > deadline:
                    raise self.explain(RuntimeError("the exchange timed out"), what)
                time.sleep(POLL_S / 10)

    def announce(self, key: str, mine: str) -> None:
        """This rank's part of an exchange, without waiting for the others'."""
        self._quietly(lambda: self._store.set(f"{key}/{self.rank}", mine))
        self._quietly(lambda: self._store.set(key, "announced"))

    def is_announced(self, key: str) -> bool:
        """Whether any rank has begun an exchange under this key."""
        return self._read(key) is not None

    def forget(self, key: str) -> None:
        """Take back what this rank said in an exchange that all ranks have ended."""
        self._quietly(lambda: self._store.delete_key(f"{key}/{self.rank}"))
        self._quietly(lambda: self._store.delete_key(key))

    def tell_exception(self, error: BaseException) -> None:
        """Leave word of an exception on this rank, for those that will find it gone or absent."""
        self._told_exception = True
        self._recorder.raised(in_words(error))
        self._quietly(lambda: self._job_store.set(exception_key(self.global_rank), in_words(error)))

    def withdraw_exception(self) -> None:
        """This rank goes on in spite of the exception it told: nothing later is to be put down to it."""
        if self._told_exception:
            self._told_exception = False
            self._quietly(lambda: self._job_store.delete_key(exception_key(self.global_rank)))

    def _failure(self, cause: Cause, what: str, said: str = "") -> CommunicationError:
        self._tell_others(cause)
        kind = CollectiveTimeoutError if cause.kind in ("absent", "apart") else PeerLostError
        left = self.last_words_of(cause.ranks) + self._last_seen(cause.ranks)
        return kind(f"rank {self.global_rank}: {what} failed, because {cause.in_words()}.{left}{said}")

    def last_words_of(self, ranks: Iterable[int], patience_s: float = 0.0) -> str:
        """The exceptions that ranks of the job told of, as sentences to append.

        Args:
            ranks: in the whole job.
            patience_s: how long to wait for the first of them, in seconds.
        """
        ranks, deadline = list(ranks), time.monotonic() + patience_s
        while True:
            texts = {rank: self._read_of_job(exception_key(rank)) for rank in ranks}
            told = "".join(f" Rank {rank} had raised {text}." for rank, text in texts.items() if text)
            if told or time.monotonic() >= deadline:
                return told
            time.sleep(POLL_S)

    def _last_seen(self, ranks: Iterable[int]) -> str:
        """Where these ranks were, as far as they keep records on this host, as sentences to append."""
        neighbours = self._neighbours()
        records = [neighbours[rank].record for rank in ranks if rank in neighbours]
        states = [read_state(Path(record)) for record in records if record]
        now = time.monotonic()
        return "".join(f" Rank {state.rank} was {whereabouts(state, now)}." for state in states if state)

    @contextlib.contextmanager
    def _standing_in_line(self, what: str) -> Iterator[None]:
        """Say in the store that we wait; a wait that fails leaves the word standing on purpose.

        Unless a peer's exception was the reason: then all ranks go on.
        """
        key = f"waiting/{self.global_rank}"
        self._recorder.say(what)
        self._quietly(lambda: self._job_store.set(key, what))
        try:
            yield
        except PeerFailedError:
            self._quietly(lambda: self._job_store.delete_key(key))
            raise
        self._quietly(lambda: self._job_store.delete_key(key))

    def _lost_ranks(self, patience_s: float) -> list[int]:
        """Ranks of this host whose process is gone, waiting up to ``patience_s`` for one to go."""
        deadline = time.monotonic() + patience_s
        while True:
            lost = [rank for rank, seat in self._neighbours().items() if not _process_alive(seat)]
            if lost or time.monotonic() >= deadline:
                return lost
            time.sleep(POLL_S)

    def _neighbours(self) -> dict[int, Seat]:
        """The other ranks whose processes this one can see."""
        if self._known_neighbours is None:
            here = _host_identity()
            texts = {rank: self._read_of_job(f"seat/{rank}") for rank in self._others()}
            seats = {rank: Seat(*json.loads(text)) for rank, text in texts.items() if text}
            self._known_neighbours = {
                rank: seat for rank, seat in seats.items() if here and seat.host == here
            }
        return self._known_neighbours

    def _cause_of_silence(self, kind: str, what: str) -> Cause:
        """Who is not here while this rank waits for ``what``, or what all the others wait for instead."""
        words = {rank: self._read_of_job(f"waiting/{rank}") for rank in self._others()}
        absent = [rank for rank, theirs in words.items() if theirs is None]
        elsewhere = "; ".join(f"rank {rank} for {theirs}" for rank, theirs in words.items() if theirs != what)
        return Cause(kind, absent) if absent or not elsewhere else Cause("apart", [], elsewhere)

    def _cause_told_by_others(self) -> Cause | None:
        """The first explanation any rank gave: it was nearest to the cause."""
        text = self._read("cause")
        if not text:
            return None
        kind, culprits = json.loads(text)
        others = [rank for rank in culprits if rank != self.global_rank]
        return Cause(kind, others) if others else None

    def _tell_others(self, cause: Cause) -> None:
        if cause.ranks:
            text = json.dumps([cause.kind, cause.ranks])
            self._quietly(lambda: self._store.compare_set("cause", "", text))

    def _others(self) -> list[int]:
        return [rank for rank in self._ranks if rank != self.global_rank]

    def _read(self, key: str) -> str | None:
        return self._read_from(self._store, key)

    def _read_of_job(self, key: str) -> str | None:
        return self._read_from(self._job_store, key)

    def _read_from(self, store: dist.Store, key: str) -> str | None:
        present = self._quietly(lambda: store.check([key]))
        value = self._quietly(lambda: store.get(key)) if present else None
        return value.decode() if value is not None else None

    def _quietly(self, call: Callable[[], Any]) -> Any:
        """The result of a store call, or None when the store cannot answer.

        Its host may be the very rank that died or was stopped, and a call to a stopped host
        never returns: so it is made from a thread that we do not wait for long.
        """
        if not self._store_answers:
            return None
        answer: list[Any] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                answer.append(call())

        thread = threading.Thread(target=ask, name="paceline-store", daemon=True)
        thread.start()
        thread.join(STORE_PATIENCE_S)
        self._store_answers = not thread.is_alive()
        return answer[0] if answer else None


def _first_line(error: BaseException) -> str:
    """Without the traceback that a future appends to the error of a callback."""
    return str(error).partition("\n")[0]


def _wait_slice(work: dist.Work) -> bool:
    """Wait one slice; False when the work is still under way, raises when it failed."""
    try:
        work.wait(SLICE)
        return True
    except RuntimeError:
        if not work.is_completed():
            return False
    work.wait()  # it may have ended just after the slice did: only now we know whether it failed
    return True


def _host_identity() -> str:
    """Equal on two ranks exactly when one can see the other's pid: same boot, same pid namespace.

    Empty where the system does not say (no /proc): then no two ranks count as neighbours.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process_alive(seat: Seat) -> bool:
    try:
        state = Path(f"/proc/{seat.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
