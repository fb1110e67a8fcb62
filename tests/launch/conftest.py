"""Launchers under test must not inherit ignored signals, which they would rightly go on ignoring."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def what_failing_launches_keep_goes_with_the_tests() -> Iterator[None]:
    """What ranks recorded is kept in the temporary folder when they failed, as many are meant to."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="launches-") as folder:
        patch.setitem(os.environ, "TMPDIR", folder)
        yield


@pytest.fixture(autouse=True)
def signals_as_in_a_terminal() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and nohup does so with SIGHUP."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    ignored = [number for number, handler in before.items() if handler is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
