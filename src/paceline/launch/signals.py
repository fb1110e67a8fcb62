"""Signals to the launcher, taken down and looked at between two looks at the ranks."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from paceline.launch.config import ENDING, FORWARDED


class SignalInbox:
    """While it is open, signals that would end the process are only noted.

    A handler that raised could interrupt anything, the starting of a rank included. What the
    launcher's caller has told it to ignore (``nohup`` does so with SIGHUP) stays ignored.
    Must be opened in the main thread.

    Args:
        handled: the signals to take down.

    Attributes:
        received: those that end the launch, in order.
    """

    def __init__(self, handled: Sequence[int] = (*ENDING, *FORWARDED)) -> None:
        self.received: list[int] = []
        self._handled = handled
        self._to_forward: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalInbox:
        # Inherited as ignored, it would let the kernel throw the ranks' exit codes away.
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in self._handled:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    @property
    def told_to_end(self) -> bool:
        """Whether a signal came that ends the launch."""
        return bool(self.received)

    def take_forwarded(self) -> list[int]:
        """The signals that came since the last time and are for the ranks alone."""
        taken, self._to_forward = self._to_forward, []
        return taken

    def _note(self, number: int, frame: FrameType | None) -> None:
        (self._to_forward if number in FORWARDED else self.received).append(number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
