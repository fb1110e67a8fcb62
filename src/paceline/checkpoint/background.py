"""A thread that writes one thing at a time while the rank goes on with something else."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundWriter:
    """Runs one job at a time in a thread of its own.

    The thread is no daemon: a process that ends lets it finish, so that a checkpoint that was
    begun is there in the end. What a job raises is kept for whoever waits for it.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether the job has raised already, and nobody has been told."""
        return self._error is not None

    def start(self, job: Callable[[], None]) -> None:
        """Run `job` in the background, once the one before is through.

        Raises:
            BaseException: what the job before raised.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name="paceline-checkpoint-writer")
        self._thread.start()

    def wait(self) -> None:
        """Return when no job is running.

        Raises:
            BaseException: what the job raised, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self._error = error
