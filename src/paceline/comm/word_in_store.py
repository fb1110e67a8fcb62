"""A word that the first of many ranks leaves for the others, in a store that may be lost with one of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_PATIENCE_S = 2.0  # a call takes well below a millisecond


class WordInStore:
    """One word, which stays as it was left first.

    The host of the store may be the very rank that is lost. When it was stopped, a call never returns: so
    calls are made from threads that nobody waits for long. And a connection on which another thread of this
    process waits for the store answers nobody else: so this is one of its own.

    Args:
        store: shared by the ranks.
        key: of the word.
    """

    def __init__(self, store: dist.Store, key: str) -> None:
        self._store, self._key = store.clone(), key  # type: ignore[attr-defined]  # it is not in the stubs
        self._answers = True

    def leave(self, word: str) -> None:
        """Leave a word, unless there is one, or the store is lost."""
        self._ask(lambda: self._store.compare_set(self._key, "", word))

    def read(self) -> str | None:
        """The word; None where there is none, or the store is lost."""
        found = self._ask(lambda: self._store.get(self._key) if self._store.check([self._key]) else None)
        return None if found is None else found.decode()

    def _ask(self, call: Callable[[], Any]) -> Any:
        if not self._answers:
            return None
        answer: list[Any] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                answer.append(call())

        thread = threading.Thread(target=ask, name="paceline-word", daemon=True)
        thread.start()
        thread.join(_PATIENCE_S)
        self._answers = not thread.is_alive()
        return answer[0] if answer else None
