"""The only file that speaks ctypes: the shared-memory kernel (csrc/) as Python calls.

Calls let go of the interpreter lock. The kernel knows addresses only; whoever calls keeps
tensors and mappings alive until an operation is done.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import BackendUnavailableError

ABI = 7  # PL_ABI in shm.h
STAGE_TURNS = 3
_REFUSED = (1 << 64) - 1  # PL_REFUSED, as ctypes gives pointers
LIBRARY = Path(__file__).parent / "libpaceline_shm.so"


class Kind(enum.IntEnum):
    """The collectives of the kernel, in the order of ``enum pl_kind``."""

    barrier = 0
    all_reduce = 1
    reduce = 2
    broadcast = 3
    all_gather = 4
    reduce_scatter = 5
    all_to_all = 6
    elsewhere = 7


class Status(enum.IntEnum):
    """How an operation stands, in the order of ``enum pl_status``."""

    OK = 0
    PENDING = 1
    TIMED_OUT = 2
    LOST = 3
    MISMATCH = 4
    CLOSED = 5
    FORKED = 6


class Call(ctypes.Structure):
    """One rank's call, ``pl_call`` in shm.h; the kernel fills in ``place``."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("reduction", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("label", ctypes.c_int32),
        ("root", ctypes.c_int32),
        ("detail", ctypes.c_int32),
        ("count", ctypes.c_int64),
        ("place", ctypes.c_int64),
        ("factor", ctypes.c_double),
    )


class Prepared(ctypes.Structure):
    """A call in place that is made often, ``pl_prepared`` in shm.h."""

    _fields_ = (("group", ctypes.c_void_p), ("timeout_s", ctypes.c_double), ("call", Call))

    def address(self) -> int:
        """Where it lies, as long as this object lives."""
        return ctypes.addressof(self)


@dataclass(frozen=True)
class Failure:
    """Why an operation failed.

    Attributes:
        status: what happened.
        culprits: ranks (of the kernel's group) it is put down to.
        calls: what each rank called, after a mismatch.
    """

    status: Status
    culprits: list[int]
    calls: list[Call]


class Operation:
    """A submitted collective; let go of with its last reference."""

    def __init__(self, library: ctypes.CDLL, address: int, size: int) -> None:
        self._library = library
        self._address = address
        self._size = size

    @property
    def number(self) -> int:
        """Which of the group's collectives this is, from 1."""
        return int(self._library.pl_number_of(self._address))

    def status(self) -> int:
        """A ``Status``, without waiting."""
        return int(self._library.pl_status_of(self._address))

    def wait(self, seconds: float) -> int:
        """Wait up to ``seconds``; a ``Status``."""
        return int(self._library.pl_wait(self._address, seconds))

    def failure(self) -> Failure:
        """Why it failed; only when ``status`` says so."""
        status = Status(self.status())
        culprits = (ctypes.c_uint8 * self._size)()
        calls = (Call * self._size)()
        self._library.pl_culprits(self._address, culprits)
        if status is Status.MISMATCH:
            self._library.pl_calls(self._address, calls)
        return Failure(status, [rank for rank in range(self._size) if culprits[rank]], list(calls))

    def __del__(self) -> None:
        self._library.pl_op_free(self._address)


class Group:
    """The ranks of one host over one board; see ``pl_open``.

    Args:
        rank: this rank among them.
        board: address of the memory all ranks map.
        arenas: address of each rank's arena as mapped here.
        arena_bytes: size of this rank's.
        stage_bytes: size of one of the ``STAGE_TURNS`` staging areas at the start of each arena.
        sockets: for each rank a connected socket that breaks when it ends, -1 for this rank.
        descriptors: what forked children must close.
        spins: how often to look for the others before sleeping.
        helpers: threads that reduce along with the one that carries out a collective.
    """

    def __init__(
        self,
        rank: int,
        board: int,
        arenas: Sequence[int],
        arena_bytes: int,
        stage_bytes: int,
        sockets: Sequence[int],
        descriptors: Sequence[int],
        spins: int,
        helpers: int,
    ) -> None:
        self._library = load()
        self._closed = False
        self._size = len(arenas)
        self._address = self._library.pl_open(
            rank,
            self._size,
            board,
            (ctypes.c_void_p * self._size)(*arenas),
            arena_bytes,
            stage_bytes,
            (ctypes.c_int * self._size)(*sockets),
            (ctypes.c_int * len(descriptors))(*descriptors),
            len(descriptors),
            spins,
            helpers,
        )
        if not self._address:
            raise MemoryError("no memory for a shared-memory process group")
        self._run, self.run_prepared = self._library.pl_run, self._library.pl_run_prepared

    def submit(self, call: Call, source: int, target: int, timeout_s: float) -> Operation:
        """Queue a collective; it begins at once, in the group's thread or that of an early waiter.

        Args:
            call: what this rank calls.
            source: address of the input.
            target: address of the output.
            timeout_s: how long the other ranks may take, from the moment it begins.

        Raises:
            OSError: there is no memory or thread for it, the group was closed (ESHUTDOWN), or this process
                is a fork (ECHILD).
        """
        operation = self._library.pl_submit(self._address, call, source, target, timeout_s, True)
        if not operation:
            raise _refusal()
        return Operation(self._library, operation, self._size)

    def run(self, call: Call, source: int, target: int, timeout_s: float) -> Operation | None:
        """Carry out a collective in the calling thread; None when it is done.

        Args:
            call: what this rank calls.
            source: address of the input.
            target: address of the output.
            timeout_s: how long the other ranks may take. It comes back earlier, with the operation, when
                they are not there within a tenth of a second.

        Raises:
            OSError: as for ``submit``.
        """
        left = self._run(self._address, call, source, target, timeout_s)
        return None if left is None else self.left_over(left)

    def prepare(self, call: Call, timeout_s: float) -> Prepared:
        """Make a call ready to be run often: ``run_prepared(address of it, address of the tensor)``.

        That does as ``run``, with the tensor as input and output; None when it is done, else what
        ``left_over`` takes.

        Args:
            call: what this rank will call.
            timeout_s: as in ``run``.
        """
        return Prepared(self._address, timeout_s, call)

    def left_over(self, address: int) -> Operation:
        """What the kernel left of a collective that is not done.

        Raises:
            OSError: as for ``submit``: it was refused.
        """
        if address == _REFUSED:
            raise _refusal()
        return Operation(self._library, address, self._size)

    def close(self) -> None:
        """Leave; operations in flight fail, and no more are taken."""
        self._library.pl_close(self._address)
        self._closed = True

    def __del__(self) -> None:
        if self._closed:  # else its thread may be at work, and both go with the process
            self._library.pl_free(self._address)


def board_bytes(size: int) -> int:
    """How large the board of so many ranks is."""
    return int(load().pl_board_bytes(size))


def map_shared(descriptor: int, size: int) -> int:
    """Map a shared file where forked children do not see it; the address.

    Raises:
        OSError: the system refused.
    """
    address = load().pl_map(descriptor, size)
    if not address:
        raise _system_error(ctypes.get_errno())
    return int(address)


def unmap(address: int, size: int) -> None:
    """Undo ``map_shared``."""
    load().pl_unmap(address, size)


def reserve(descriptor: int, offset: int, size: int) -> None:
    """Take pages for a range of a shared file, so that touching them cannot fail.

    Raises:
        OSError: there are not that many.
    """
    code = load().pl_reserve(descriptor, offset, size)
    if code:
        raise _system_error(code)


def release(descriptor: int, offset: int, size: int) -> None:
    """Give the pages of a range back; it reads as zeros from now on."""
    load().pl_release(descriptor, offset, size)


def why_unavailable() -> str | None:
    """None when the kernel can be used here, else the reason."""
    try:
        load()
    except BackendUnavailableError as error:
        return str(error)
    return None


@functools.cache
def load() -> ctypes.CDLL:
    """The kernel's library.

    Raises:
        BackendUnavailableError: it was not built, cannot be loaded, or is of another version.
    """
    if not LIBRARY.exists():
        raise BackendUnavailableError(
            "the shared-memory kernel was not built: install a C compiler and reinstall paceline"
        )
    try:
        library = ctypes.CDLL(str(LIBRARY), use_errno=True)
    except OSError as error:
        raise BackendUnavailableError(f"the shared-memory kernel cannot be loaded: {error}") from error
    found = library.pl_abi()
    if found != ABI:
        raise BackendUnavailableError(
            f"{LIBRARY} has ABI {found}, but this paceline needs {ABI}: reinstall paceline"
        )
    return _typed(library)


def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    address, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    signatures = {
        "pl_board_bytes": (size, [integer]),
        "pl_open": (
            address,
            [integer, integer, address, address, size, size, address, address, integer, integer, integer],
        ),
        "pl_close": (None, [address]),
        "pl_free": (None, [address]),
        "pl_submit": (
            address,
            [address, ctypes.POINTER(Call), address, address, ctypes.c_double, integer],
        ),
        "pl_run": (address, [address, ctypes.POINTER(Call), address, address, ctypes.c_double]),
        "pl_run_prepared": (address, [address, address]),
        "pl_wait": (integer, [address, ctypes.c_double]),
        "pl_status_of": (integer, [address]),
        "pl_number_of": (ctypes.c_uint64, [address]),
        "pl_culprits": (None, [address, address]),
        "pl_calls": (None, [address, address]),
        "pl_op_free": (None, [address]),
        "pl_map": (address, [integer, size]),
        "pl_unmap": (integer, [address, size]),
        "pl_reserve": (integer, [integer, size, size]),
        "pl_release": (integer, [integer, size, size]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _refusal() -> OSError:
    return _system_error(ctypes.get_errno() or errno.ENOMEM)


def _system_error(code: int) -> OSError:
    return OSError(code, os.strerror(code))
