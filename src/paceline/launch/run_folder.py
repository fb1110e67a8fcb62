"""The folder of a run: where its ranks record what they do, kept when ranks failed.

    --log_dir LOGS    LOGS/<run>, which is the user's
    else              paceline-run-* in the temporary folder: gone after a run that went well, kept after
                      one that did not, and removed by a later launch when it is a week old or a hundred
                      newer ones are there

Note: which folders are in use
    A launcher holds a lock on its run's folder, which the kernel lets go of when the launcher ends in any
    way. So a run of many weeks keeps its folder, and one whose launcher was killed has it until it is old.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from paceline.errors import LaunchError

PREFIX = "paceline-run-"
_OLD_S = 7 * 24 * 3600.0
_MANY = 100


class RunFolder:
    """The folder of this run, while the context is open.

    Args:
        of_user: below the user's --log_dir; None makes one in the temporary folder.

    Attributes:
        path: of the folder.
        keep: whether it stays; the user's does in any case.

    Raises:
        LaunchError: there is no place for it.
    """

    def __init__(self, of_user: Path | None) -> None:
        self.keep = of_user is not None
        self.path = _made(of_user) if of_user else temporary_folder(PREFIX)
        self._lock = None if of_user else _lock(self.path)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.keep:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        remove_old(Path(tempfile.gettempdir()))


def temporary_folder(prefix: str) -> Path:
    """A new folder in the temporary one.

    Raises:
        LaunchError: it cannot be made.
    """
    try:
        return Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise LaunchError(
            f"no temporary folder can be made: {error.strerror or error}; set TMPDIR to a folder that can be "
            "written to"
        ) from None


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"the folder {str(folder)!r} cannot be made: {error.strerror}; name another with --log_dir"
        ) from None
    return folder


def remove_old(temporary: Path, *, older_than_s: float = _OLD_S, more_than: int = _MANY) -> None:
    """Remove what runs that failed left behind, when it is old, or much.

    Args:
        temporary: the folder that has them.
        older_than_s: seconds since anything was last made in a run's folder.
        more_than: how many of the newest stay.
    """
    newest_first = sorted(_left_behind(temporary), reverse=True)
    for number, (changed, path) in enumerate(newest_first):
        if number >= more_than or time.time() - changed > older_than_s:
            lock = _lock(path)
            if lock is not None:  # and so its launcher is gone
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _left_behind(temporary: Path) -> Iterator[tuple[float, Path]]:
    """This user's folders of runs, each with when it was changed last."""
    with contextlib.suppress(OSError), os.scandir(temporary) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_uid == os.getuid():
                        yield status.st_mtime, Path(entry.path)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the lock on a folder; None when somebody else does."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
