"""Files and folders that appear whole or not at all.

    write aside -> flush -> fsync -> rename -> fsync the folder

A rename within one file system is atomic: whoever looks sees the old content or
the new one. Without the fsync before it, a power loss can leave the new name with
no content behind it.

Note "who is at work". Killed writers leave files and folders behind that nobody else will delete. These
cannot be told by their looks from those that another run, or a rank of another machine, is writing at this
moment. So whoever writes one holds a shared lock on it, which the system lets go of when the process ends,
however it ends. What cannot be locked for oneself alone (as on NFS) is taken to be in use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from paceline.errors import ArgumentError

ASIDE_PREFIX = ".aside-"


def save(obj: Any, path: str | os.PathLike[str]) -> None:
    """``torch.save`` that never leaves a torn file.

    Killed at any moment, what is at `path` is the old content or the new one.
    Call it on one rank: several ranks that save to one path each write all of it,
    and the last one stays.

    Args:
        obj: anything ``torch.save`` takes.
        path: a file name; its folder must exist. A link stays one: the file it points to is replaced.

    Raises:
        ArgumentError: `path` is not a file name.
        OSError: the disk is full, the folder is missing, or `path` is one; what was at `path` is as it was.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"path is {path!r}, but a file name is needed; torch.save takes open files")
    try:
        with whole_file(path) as file:
            torch.save(obj, file)
    except (OSError, RuntimeError) as error:
        # torch tries to close its archive after a failed write, and raises of that.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError) or cause.filename is not None:
            raise
        raise OSError(cause.errno, cause.strerror, os.fspath(path)) from error


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a binary file that takes the name `path` when the block ends without an exception.

    It has the mode of the file that it replaces.

    Raises:
        OSError: there is no folder for it, or a folder in its place.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder stands where the file is to be", str(target))
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the folder for the file is not there", str(target.parent))
    remove_leftovers(target.parent, f"{target.name}-")
    with _file_aside(target) as (file, aside):
        yield file
        file.flush()
        os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode) if target.exists() else _usual_mode())
        os.fsync(file.fileno())
        os.replace(aside, target)
    sync_folder(target.parent)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a small text file (UTF-8) whole or not at all."""
    with whole_file(path) as file:
        file.write(text.encode())


@contextmanager
def whole_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give an empty folder that takes the name `path` when the block ends without an exception.

    A folder that has the name already makes way at the very end. Two renames are
    needed for that, so a kill between them leaves neither: whoever looks for the
    newest complete checkpoint then finds the one before.
    """
    target = Path(path).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _folder_aside(target.parent, target.name) as aside:
        yield aside
        sync_tree(aside)
        os.chmod(aside, _usual_mode(folder=True))
        while not _renamed(aside, target):
            remove_folder(target)
    sync_folder(target.parent)


@contextmanager
def whole_files(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Give an empty folder whose files replace those of the same names in `folder` at the end.

    Each file appears whole; other files of `folder` stay.
    """
    target = Path(folder).absolute()
    target.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target)
    with _folder_aside(target, "files") as aside:
        yield aside
        sync_tree(aside)
        for file in sorted(path for path in aside.rglob("*") if path.is_file()):
            place = target / file.relative_to(aside)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, place)
    sync_folder(target)


def remove_folder(path: Path) -> None:
    """Delete a folder without ever leaving half of it under its name; it may be gone already."""
    with _folder_aside(path.parent, path.name) as aside, contextlib.suppress(FileNotFoundError):
        os.rename(path, aside / path.name)


def remove_leftovers(folder: Path, name: str = "") -> None:
    """Delete what killed writers of `name...` left in `folder` (of anything, without it); what is being
    written stays."""
    for path in folder.glob(f"{ASIDE_PREFIX}{glob.escape(name)}*"):
        with contextlib.suppress(OSError), _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


@contextmanager
def _file_aside(target: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """An empty open file beside `target`, in use for the length of the block; deleted if it is left there."""
    with contextlib.ExitStack() as stack:
        handle, aside = _make_file_aside(target)
        while not _taken(aside, stack):
            os.close(handle)
            handle, aside = _make_file_aside(target)
        stack.callback(aside.unlink, missing_ok=True)
        yield stack.enter_context(os.fdopen(handle, "wb")), aside


def _make_file_aside(target: Path) -> tuple[int, Path]:
    handle, name = tempfile.mkstemp(prefix=f"{ASIDE_PREFIX}{target.name}-", dir=target.parent)
    return handle, Path(name)


@contextmanager
def _folder_aside(parent: Path, name: str) -> Iterator[Path]:
    """An empty folder in `parent`, in use for the length of the block; what is left of it is deleted.

    Args:
        parent: where it is made.
        name: of what is written in it, for `remove_leftovers`.
    """
    with contextlib.ExitStack() as stack:
        aside = _make_folder_aside(parent, name)
        while not _taken(aside, stack):
            aside = _make_folder_aside(parent, name)
        stack.callback(shutil.rmtree, aside, ignore_errors=True)
        yield aside


def _make_folder_aside(parent: Path, name: str) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"{ASIDE_PREFIX}{name}-", dir=parent))


def _taken(aside: Path, stack: contextlib.ExitStack) -> bool:
    """Mark a new file or folder as in use until `stack` ends; False if it was taken for a leftover before."""
    with contextlib.suppress(FileNotFoundError):
        stack.enter_context(_locked(aside, fcntl.LOCK_SH))
    return aside.exists()


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    """The block in which a file or folder is locked, where the file system can do that.

    Raises:
        OSError: it is to be locked for oneself alone, and cannot be.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.nullcontext() if how & fcntl.LOCK_EX else contextlib.suppress(OSError):
            fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)


def _renamed(aside: Path, target: Path) -> bool:
    """Give `aside` the name `target`, unless a folder with something in it has that name."""
    try:
        os.rename(aside, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def sync_tree(folder: Path) -> None:
    """Flush every file below `folder`, and the folders, to the disk; readable for whoever new files are."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(_usual_mode())
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        elif path.is_dir():
            sync_folder(path)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of names to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _usual_mode(folder: bool = False) -> int:
    """The mode open() or mkdir() would have given; temporary files are made private."""
    mask = os.umask(0)
    os.umask(mask)
    return (0o777 if folder else 0o666) & ~mask
