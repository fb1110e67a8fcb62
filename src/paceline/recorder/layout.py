"""The file of one rank's record: where things lie in it, and how it comes into being.

    header       1 KiB   text: which rank, process, host, and what the clock showed
    where      2 x 1 KiB   the main thread's line, written once a second       (sampler.py)
    words      2 x 1 KiB   what a wait that takes long is for                  (ring.py)
    ring         rest    facts of 64 bytes, the newest over the oldest         (ring.py)

The file is mapped into memory, so what was written survives the process, however it ends. It is read
while it is written, and its writer may be killed between two bytes: a fact has its number at both ends,
and a text has a checksum and alternates between two places, so that half of either is noticed.

Beside it, ``*.names`` holds the texts that facts refer to by number, a line each.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import time
import zlib
from enum import IntEnum
from pathlib import Path

MAGIC = b"paceline record 1\n"
SUFFIX, NAMES_SUFFIX = ".record", ".names"
HEADER_BYTES = TEXT_BYTES = 1024
WHERE_AT = HEADER_BYTES
WORDS_AT = WHERE_AT + 2 * TEXT_BYTES
RING_AT = 8192
RING_FACTS = 2048  # a power of two
FACT_BYTES = 64
FILE_BYTES = RING_AT + RING_FACTS * FACT_BYTES

# number, time, kind, micro-batch, step, name, (unused), count, size, (unused), number again
FACT = struct.Struct("<QdHHIIIQQQQ")
# number, time, length of the text, checksum
TEXT_HEAD = struct.Struct("<QdII")


class Kind(IntEnum):
    """What a fact says. ``count`` and ``size`` are the fact's numbers.

    Those of the engine count backward passes that synchronise: a forward belongs to the one that follows.
    """

    FORWARD = 1  # begins; count: pass
    FORWARD_ENDED = 2  # count: pass
    BACKWARD = 3  # begins; count: pass
    LAUNCHED = 4  # a bucket, by name; count: pass
    BACKWARD_ENDED = 5  # all gradients of this rank are there; count: pass
    PASS_FINISHED = 6  # all averages are there; count: pass
    WAIT = 7  # begins, for other ranks; in a pass for its buckets, in the order in which they were launched
    WAIT_ENDED = 8  # size: microseconds waited so far, in all waits
    WAIT_FAILED = 9
    COLLECTIVE = 10  # one called outside of the engine, by name; count: which of its group; size: bytes
    PHASE = 11  # of the trainer, by name
    RAISED = 12  # an exception, by name


def open_file(folder: Path, identity: str, rank: int | None, world_size: int) -> mmap.mmap | None:
    """This process's record in ``folder``, made if need be; None when it cannot be had.

    Args:
        folder: of the run; made if need be.
        identity: what the file is called.
        rank: this rank in the job, None if it is not known yet.
        world_size: number of ranks.

    Returns:
        The file, mapped. None where another living process writes it (this one is then no rank but its
        helper, with the rank's environment), or where the folder cannot hold it.
    """
    path = folder / f"{identity}{SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_if_abandoned(path)
        with contextlib.suppress(FileExistsError):
            _create(path, rank, world_size)
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), FILE_BYTES)
    except (OSError, ValueError):
        return None
    return memory if read_header(memory).get("pid") == os.getpid() else None


def write_header(memory: mmap.mmap, rank: int | None, world_size: int) -> None:
    """Say whose record it is."""
    header = {
        "rank": rank,
        "world_size": world_size,
        "pid": os.getpid(),
        "host": os.uname().nodename,
        "monotonic": time.monotonic(),
        "time": time.time(),
    }
    text = MAGIC + json.dumps(header).encode() + b"\n"
    memory[:HEADER_BYTES] = text.ljust(HEADER_BYTES, b" ")


def read_header(memory: mmap.mmap | bytes) -> dict[str, int | float | str | None]:
    """Whose record it is; empty when it is none."""
    head = bytes(memory[:HEADER_BYTES])
    if not head.startswith(MAGIC):
        return {}
    try:
        return dict(json.loads(head.removeprefix(MAGIC)))
    except ValueError:
        return {}


def write_text(memory: mmap.mmap | bytearray, at: int, number: int, text: str) -> None:
    """Write the ``number``-th text at one of its two places, beside the one before."""
    data = text.encode(errors="replace")[: TEXT_BYTES - TEXT_HEAD.size]
    place = at + number % 2 * TEXT_BYTES
    start = place + TEXT_HEAD.size
    memory[start : start + len(data)] = data
    TEXT_HEAD.pack_into(memory, place, number, time.monotonic(), len(data), zlib.crc32(data, number))


def read_text(memory: bytes, at: int) -> tuple[int, float, str]:
    """The newest whole text: its number, when it was written, and itself; (0, 0.0, "") when there is none."""
    found = (0, 0.0, "")
    for place in (at, at + TEXT_BYTES):
        number, when, length, checksum = TEXT_HEAD.unpack_from(memory, place)
        start = place + TEXT_HEAD.size
        data = memory[start : start + min(length, TEXT_BYTES - TEXT_HEAD.size)]
        if number > found[0] and zlib.crc32(data, number & 0xFFFFFFFF) == checksum:
            found = (number, when, data.decode(errors="replace"))
    return found


def _create(path: Path, rank: int | None, world_size: int) -> None:
    """The file appears under its name with its space reserved: no later write can find the disk full."""
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        reserve = getattr(os, "posix_fallocate", None)
        reserve(descriptor, 0, FILE_BYTES) if reserve else os.ftruncate(descriptor, FILE_BYTES)
        with mmap.mmap(descriptor, FILE_BYTES) as memory:
            write_header(memory, rank, world_size)
        os.link(aside, path)
    finally:
        os.close(descriptor)
        os.unlink(aside)


def _remove_if_abandoned(path: Path) -> None:
    """A rank that was started again, in the same folder, begins a new record."""
    try:
        pid = read_header(path.read_bytes()[:HEADER_BYTES]).get("pid")
    except OSError:
        return
    if not isinstance(pid, int) or not _is_alive(pid):
        path.unlink(missing_ok=True)
        path.with_suffix(NAMES_SUFFIX).unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
