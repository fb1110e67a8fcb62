"""One rank works while the others wait, however long it takes.

A collective is the wrong tool for that: it raises after the group's timeout although
the working rank is alive and well. So the waiting ranks look into the group's store
every now and then instead. If the working rank fails, it says so there; if the process
that holds the store dies, the connection breaks, and the waiting ranks raise.
"""

from __future__ import annotations

import base64
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from paceline.comm.select import default_store
from paceline.errors import CommunicationError, PeerFailedError, PeerLostError

Result = TypeVar("Result")

# Seconds between two looks; the first looks are closer together, for turns that are short.
LOOK_EVERY = 0.2


class Turns:
    """Turns of one rank at a time, over the default process group's store.

    All ranks must take the same turns in the same order.
    """

    def __init__(self) -> None:
        store = default_store()
        if store is None:
            raise CommunicationError(
                f"backend {dist.get_backend_config()!r} has no store, so ranks cannot wait for each other's "
                f"work; use gloo beside it, as in init_process_group('cpu:gloo,...')"
            )
        self._store = dist.PrefixStore("paceline/turns", store)
        self._rank = dist.get_rank()

    @contextmanager
    def first(self, first: int, what: str) -> Iterator[None]:
        """Let rank `first` run the block before the ranks that wait for it do.

        Args:
            first: the rank this one waits for; itself, if it is the one that goes first.
            what: what is done, for the error.

        Raises:
            PeerFailedError: the block raised on rank `first`.
            PeerLostError: the process that holds the store is gone.
        """
        key = self._next_key(f"first/{first}", first, what)
        if self._rank != first:
            self._wait_for(key, first, what)
            yield
            return
        with self._telling_failures(key):
            yield
        self._store.set(key, _packed(True, None))

    def on_rank_zero(self, function: Callable[[], Result], what: str) -> Result:
        """Call `function` on rank 0 and give every rank its (picklable) result.

        Raises:
            PeerFailedError: on the other ranks, when it raised on rank 0 (where its own exception goes on).
            PeerLostError: the process that holds the store is gone.
        """
        key = self._next_key("rank_zero", 0, what)
        if self._rank != 0:
            told: Result = self._wait_for(key, 0, what)
            return told
        with self._telling_failures(key):
            result = function()
            self._store.set(key, _packed(True, result))
        return result

    def _next_key(self, kind: str, first: int, what: str) -> str:
        """The same new key on every rank; counted in the store, so that no state lives in this process."""
        with self._naming_the_lost(first, what):
            return f"{kind}/{self._store.add(f'{kind}/turn_of/{self._rank}', 1)}"

    @contextmanager
    def _telling_failures(self, key: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._store.set(key, _packed(False, f"{type(error).__name__}: {error}"))
            raise

    def _wait_for(self, key: str, first: int, what: str) -> Any:
        pause = 0.001
        with self._naming_the_lost(first, what):
            while not self._store.check([key]):
                time.sleep(pause)
                pause = min(2 * pause, LOOK_EVERY)
            done, value = pickle.loads(base64.b64decode(self._store.get(key)))
        if not done:
            raise PeerFailedError(f"rank {self._rank} waited for rank {first} ({what}), which raised {value}")
        return value

    @contextmanager
    def _naming_the_lost(self, first: int, what: str) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            raise PeerLostError(
                f"rank {self._rank} waited for rank {first} ({what}), and the connection to the store "
                f"broke: {error}"
            ) from error


def _packed(done: bool, value: Any) -> str:
    """What a rank leaves in the store: that its turn went well and the result, or what it raised."""
    return base64.b64encode(pickle.dumps((done, value))).decode()
