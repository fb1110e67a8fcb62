"""Memory that the ranks of a host share: an anonymous file per rank, from which tensors are cut.

The file has no name (memfd), so nothing is left when its processes end, and the size of
/dev/shm does not matter. Its address range is large and empty; pages are taken when a
tensor is allocated and given back with its last reference.

Note "no SIGBUS": touching a page that the system cannot provide kills the process. So pages
are taken by a system call that can fail, and what a memory cgroup would answer with its
OOM killer is asked for beforehand.

Note "addresses that are too much alike": the system maps the arenas one beside the other, and ranks work
on the same place of all of them at once. Were their distance a large power of two, these addresses would
share their lower bits. AMD's first-level cache looks for data by a hash of those: sums of tensors that
fit the caches took half as long again. So the size of an arena is no such power.
"""

from __future__ import annotations

import bisect
import ctypes
import math
import os
import weakref
from pathlib import Path

import torch
from torch import Tensor

from paceline.comm import native

PAGE = 4096
LARGEST = 1 << 36  # bytes of address range; nothing is used of it until it is allocated
SMALLEST = 1 << 30
SKEW = 37 * PAGE  # see "addresses that are too much alike"; odd, so that no multiple is a large power of two
CGROUP_MARGIN = 16 << 20  # bytes left to the process itself


class SharedFile:
    """An anonymous file, mapped; the mapping lasts as long as this object.

    Args:
        descriptor: of the file; closed with this object, or at once when ``keep_open`` is False.
        size: in bytes.
    """

    def __init__(self, descriptor: int, size: int, keep_open: bool = False) -> None:
        self.size = size
        self.descriptor = descriptor
        try:
            self.address = native.map_shared(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
        if not keep_open:
            os.close(descriptor)
        kept = descriptor if keep_open else None
        weakref.finalize(self, _let_go, self.address, size, kept, os.getpid()).atexit = False


class Arena:
    """This rank's shared memory.

    Args:
        stage_bytes: what is reserved at its start for the kernel.

    Raises:
        OSError: the system has no anonymous shared files, address range or memory for it.
    """

    def __init__(self, stage_bytes: int) -> None:
        self.file = _largest_file()
        self._free = [(_whole_pages(stage_bytes), self.file.size)]  # (begin, end), sorted, not touching
        self._take_pages(0, _whole_pages(stage_bytes))

    def holds(self, address: int, size: int) -> bool:
        """Whether a range of memory lies in it."""
        begin = self.file.address
        return begin <= address and address + size <= begin + self.file.size

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-d tensor of zeros in the arena; its pages go back with its storage.

        Args:
            numel: number of elements.
            dtype: any dtype.

        Raises:
            MemoryError: the host, or this process's memory cgroup, does not have that much left.
        """
        size = _whole_pages(numel * dtype.itemsize)
        if size == 0:
            return torch.zeros(numel, dtype=dtype, device="cpu")
        begin = self._cut(size)
        try:
            self._take_pages(begin, size)
        except OSError as error:
            self._put_back(begin, size)
            raise MemoryError(
                f"no shared memory for a tensor of {numel:,} x {dtype} ({size / 2**20:,.0f} MiB): "
                f"{error.strerror}"
            ) from error
        memory = (ctypes.c_char * (numel * dtype.itemsize)).from_address(self.file.address + begin)
        # Holds the arena: the mapping outlives the process group while tensors are in use.
        weakref.finalize(memory, self._release, begin, size, os.getpid()).atexit = False
        return torch.frombuffer(memory, dtype=dtype)

    def _take_pages(self, begin: int, size: int) -> None:
        headroom = _cgroup_headroom()
        if size > headroom:
            raise OSError(12, f"the memory cgroup has {headroom / 2**20:,.0f} MiB left")
        native.reserve(self.file.descriptor, begin, size)

    def _cut(self, size: int) -> int:
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                self._free[index : index + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        raise MemoryError(f"the arena's address range of {self.file.size / 2**30:.0f} GiB is used up")

    def _put_back(self, begin: int, size: int) -> None:
        end = begin + size
        index = bisect.bisect(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == begin:
            begin = self._free.pop(index - 1)[0]
            index -= 1
        self._free.insert(index, (begin, end))

    def _release(self, begin: int, size: int, owner: int) -> None:
        if os.getpid() != owner:
            return  # a forked child has the tensor object, but not the memory
        native.release(self.file.descriptor, begin, size)
        self._put_back(begin, size)


def anonymous_file(name: str, size: int) -> int:
    """The descriptor of a new anonymous file of ``size`` bytes, none of them in memory yet."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _largest_file() -> SharedFile:
    """As much address range as the process may have."""
    size = LARGEST
    while True:
        try:
            descriptor = anonymous_file("paceline-arena", size + SKEW)
            return SharedFile(descriptor, size + SKEW, keep_open=True)
        except OSError:
            if size == SMALLEST:
                raise
            size //= 2


def _let_go(address: int, size: int, descriptor: int | None, owner: int) -> None:
    if os.getpid() != owner:
        return
    native.unmap(address, size)
    if descriptor is not None:
        os.close(descriptor)


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _cgroup_headroom() -> float:
    """Bytes this process's memory cgroups still allow; infinite where there is no limit."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return math.inf
    headroom = math.inf
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            headroom = min(headroom, _headroom_below(controllers, path))
    return headroom


def _headroom_below(controllers: str, path: str) -> float:
    """The least that a cgroup and those around it allow."""
    if controllers == "memory":
        root, limit_name, usage_name = (
            Path("/sys/fs/cgroup/memory"),
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
        )
    else:
        root, limit_name, usage_name = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
    folder = root / path.lstrip("/")
    if not folder.is_dir():
        folder = root  # in a container the own cgroup is mounted as the root
    headroom = math.inf
    while True:
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and usage is not None and limit < 1 << 60:
            reclaimable = _file_pages(folder)
            headroom = min(headroom, limit - usage + reclaimable - CGROUP_MARGIN)
        if folder == root:
            return headroom
        folder = folder.parent


def _file_pages(folder: Path) -> int:
    """Bytes of files kept in memory that the cgroup would drop first."""
    try:
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None
