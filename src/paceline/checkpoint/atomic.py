"""Files and folders that appear whole or not at all.

    write aside -> flush -> fsync -> rename -> fsync the folder

A rename within one file system is atomic: whoever looks sees the old content or
the new one. Without the fsync before it, a power loss can leave the new name with
no content behind it.
"""

from __future__ import annotations

import os
import shutil
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
        path: a file name; its folder must exist.

    Raises:
        ArgumentError: `path` is not a file name.
        OSError: the disk is full or the folder is missing; `path` is as it was.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"path is {path!r}, but a file name is needed; torch.save takes open files")
    with whole_file(path) as file:
        torch.save(obj, file)


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a binary file that takes the name `path` when the block ends without an exception."""
    target = Path(path).absolute()
    handle, aside = tempfile.mkstemp(prefix=f"{ASIDE_PREFIX}{target.name}-", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, _usual_mode())
        os.replace(aside, target)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
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
    aside = Path(tempfile.mkdtemp(prefix=f"{ASIDE_PREFIX}{target.name}-", dir=target.parent))
    try:
        yield aside
        sync_tree(aside)
        os.chmod(aside, _usual_mode(folder=True))
        if target.exists():
            remove_folder(target)
        os.rename(aside, target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync_folder(target.parent)


@contextmanager
def whole_files(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Give an empty folder whose files replace those of the same names in `folder` at the end.

    Each file appears whole; other files of `folder` stay.
    """
    target = Path(folder).absolute()
    target.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=ASIDE_PREFIX, dir=target))
    try:
        yield aside
        sync_tree(aside)
        for file in sorted(path for path in aside.rglob("*") if path.is_file()):
            place = target / file.relative_to(aside)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, place)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    sync_folder(target)


def remove_folder(path: Path) -> None:
    """Delete a folder without ever leaving half of it under its name."""
    aside = Path(tempfile.mkdtemp(prefix=f"{ASIDE_PREFIX}{path.name}-", dir=path.parent))
    os.rename(path, aside / path.name)
    shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(folder: Path, name: str) -> None:
    """Delete what killed writers of folders named `name...` left in `folder`.

    Call it only while nobody else writes such a folder there.
    """
    for path in folder.glob(f"{ASIDE_PREFIX}{name}*"):
        shutil.rmtree(path, ignore_errors=True)


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
