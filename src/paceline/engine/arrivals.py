"""Which gradients have arrived in the running pass, noted without running Python code.

Note "what a hook costs": autograd calls one for every parameter in every backward, and a
Python function there costs more than all else that the engine does for a small parameter.
So the hook of most parameters is an ``append`` of a list, which runs at the speed of C, and
the reducer reads the list when a bucket is likely to be full (``BucketLayout.listen``) and
when backward ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from paceline.engine.callbacks import WeakCall


class Arrivals:
    """The parameters whose gradients were accumulated in the running pass, in order.

    Args:
        on_first: a bound method, called with the parameter of the first gradient if no pass has been
            opened, as long as its object lives.

    Attributes:
        hook: to be registered on parameters.
    """

    def __init__(self, on_first: Callable[[Tensor], None]) -> None:
        self._on_first = WeakCall(on_first)
        self._noted: list[Tensor] = []
        self._read = 0
        self.hook = functools.partial(self._on_first)
        self.close()

    def open(self) -> None:
        """A pass begins: note what arrives."""
        self._redirect(self._noted.append)

    def note(self, parameter: Tensor) -> None:
        """Note what arrived at a hook other than ``hook``."""
        self._noted.append(parameter)

    def news(self) -> list[Tensor]:
        """What has arrived since the last call."""
        news = self._noted[self._read :]
        self._read += len(news)
        return news

    def close(self) -> None:
        """The pass has ended: forget it, and ask to be opened at the next gradient."""
        self._noted.clear()
        self._read = 0
        self._redirect(self._on_first)

    def _redirect(self, function: Callable[[Tensor], None]) -> None:
        """Let ``hook``, which hangs on thousands of parameters, call ``function`` from now on."""
        attributes = {"owner": self._on_first.owner}
        self.hook.__setstate__((function, (), {}, attributes))  # type: ignore[attr-defined]
