"""Signals that end the launcher, taken down and looked at between two looks at the ranks."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class SignalInbox:
    """While it is open, signals that would end the process are only noted.

    A handler that raised could interrupt anything, the starting of a rank included. What the
    launcher's caller has told it to ignore (``nohup`` does so with SIGHUP) stays ignored.
    Must be opened in the main thread.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalInbox:
        # Inherited as ignored, it would let the kernel throw the ranks' exit codes away.
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in _ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
