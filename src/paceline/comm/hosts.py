"""Which ranks of a group can share memory, and how they come to share it.

    same_host      ranks that name the same kernel boot and network namespace, through the group's store
    join           connect to each of them, hand over this rank's memory, map theirs
    all_agree      every rank of the group says whether that worked; if not for one, nobody shares

What counts is what works: a container of its own, another network namespace or a forbidden
system call each make ranks talk through Gloo instead, on all ranks alike.

The connections (abstract Unix sockets: no file is left) stay open. A process that ends, in
whatever way, breaks them, and that is how the others learn of it.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from paceline.comm import native
from paceline.comm.arena import Arena, SharedFile, anonymous_file
from paceline.errors import BackendUnavailableError

STAGE_BYTES = 512 * 1024  # of one staging area: a piece stays in the caches between copy and reduction
MOST_HELPERS = 3
JOIN_TIMEOUT_S = 60.0
_HELLO = struct.Struct("<16sIQ")  # token, rank in the group, bytes of arena


@dataclass(frozen=True)
class Layout:
    """How the ranks of a group are spread over hosts.

    Attributes:
        hosts: the ranks of each host, in order; hosts are ordered by their first rank.
        rank: this rank.
    """

    hosts: tuple[tuple[int, ...], ...]
    rank: int

    @property
    def host(self) -> int:
        """The index of this rank's host."""
        return self.host_of(self.rank)

    def host_of(self, rank: int) -> int:
        """The index of a rank's host."""
        return next(index for index, ranks in enumerate(self.hosts) if rank in ranks)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks of this host, this one included."""
        return self.hosts[self.host]

    def in_words(self) -> str:
        """Who shares memory with whom."""
        together = [ranks for ranks in self.hosts if len(ranks) > 1]
        if not together:
            return "no ranks share memory"
        return "; ".join(f"ranks {', '.join(map(str, ranks))} share memory" for ranks in together)


class Neighbours:
    """The shared memory of one host's ranks, and the connections between them.

    Args:
        ranks: the host's ranks, in order.
        rank: this rank.
        arena: this rank's memory.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, arena: Arena) -> None:
        self.ranks = ranks
        self.local_rank = ranks.index(rank)
        self.arena = arena
        self.connections: dict[int, socket.socket] = {}
        self._owner = os.getpid()
        self.files: dict[int, SharedFile] = {rank: arena.file}
        self.board: SharedFile | None = None

    def open(self) -> native.Group:
        """The kernel's view of these ranks."""
        assert self.board is not None
        sockets = [self.connections[rank].fileno() if rank in self.connections else -1 for rank in self.ranks]
        return native.Group(
            self.local_rank,
            self.board.address,
            [self.files[rank].address for rank in self.ranks],
            self.arena.file.size,
            STAGE_BYTES,
            sockets,
            [*(number for number in sockets if number >= 0), self.arena.file.descriptor],
            _spins(len(self.ranks)),
            helpers_of(len(self.ranks)),
        )

    def disconnect(self) -> None:
        """Close the connections: to the others it looks as if this process had ended."""
        for connection in self.connections.values():
            if os.getpid() == self._owner:
                connection.close()
            else:  # closed when this process was forked, and the number may stand for another file by now
                connection.detach()


def same_host(store: dist.Store, rank: int, size: int) -> Layout:
    """Group the ranks by host, as far as they can tell by themselves."""
    store.set(f"host/{rank}", _identity(rank))
    by_host: dict[str, list[int]] = {}
    for other in range(size):
        by_host.setdefault(store.get(f"host/{other}").decode(), []).append(other)
    return Layout(tuple(tuple(ranks) for ranks in by_host.values()), rank)


def join(store: dist.Store, layout: Layout) -> Neighbours | str:
    """Share memory with the other ranks of this host; says why in words when that does not work."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    address = ""
    try:
        arena = Arena(native.STAGE_TURNS * STAGE_BYTES)
        listener.bind(f"\0paceline-{secrets.token_hex(16)}")
        listener.listen(len(layout.neighbours))
        address = listener.getsockname()[1:].decode()
    except (OSError, MemoryError, BackendUnavailableError) as error:
        return f"rank {layout.rank} cannot share memory: {error}"
    finally:
        store.set(f"address/{layout.rank}", address)  # whatever happens: the others wait for it
    try:
        neighbours = Neighbours(layout.neighbours, layout.rank, arena)
        _connect_all(store, layout, neighbours, listener)
        return neighbours
    except OSError as error:
        return f"rank {layout.rank} cannot share memory: {error}"
    finally:
        listener.close()


def all_agree(store: dist.Store, rank: int, size: int, reason: str | None) -> str | None:
    """None when every rank could join, else the reason of the first that could not; the same on all ranks."""
    store.set(f"joined/{rank}", reason or "yes")
    answers = [store.get(f"joined/{other}").decode() for other in range(size)]
    return next((answer for answer in answers if answer != "yes"), None)


def _identity(rank: int) -> str:
    """Equal on two ranks exactly when an abstract socket of one can be reached by the other."""
    if native.why_unavailable() is not None:
        return f"rank {rank} has no kernel"
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/net')}/{os.getuid()}"
    except OSError:
        return f"rank {rank} has no /proc"


def _connect_all(store: dist.Store, layout: Layout, neighbours: Neighbours, listener: socket.socket) -> None:
    """A connection to every other rank: to lower ones by calling, to higher ones by being called."""
    ranks, rank = layout.neighbours, layout.rank
    addresses = {other: store.get(f"address/{other}").decode() for other in ranks}
    if not all(addresses.values()):
        raise OSError("another rank of this host cannot")
    token = _token(store, ranks, rank)
    board = -1
    if rank == ranks[0]:
        size = native.board_bytes(len(ranks))
        board = anonymous_file("paceline-board", size)
        native.reserve(board, 0, size)
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    for other in ranks[: ranks.index(rank)]:
        connection = _call(addresses[other], deadline)
        _say_hello(connection, token, neighbours, rank, board)
        board = _hear_hello(connection, token, neighbours, board)
    for _ in ranks[ranks.index(rank) + 1 :]:
        listener.settimeout(max(0.0, deadline - time.monotonic()))
        connection, _ = listener.accept()
        connection.settimeout(JOIN_TIMEOUT_S)
        _hear_hello(connection, token, neighbours, board)
        _say_hello(connection, token, neighbours, rank, board)
    neighbours.board = SharedFile(board, native.board_bytes(len(ranks)))


def _token(store: dist.Store, ranks: tuple[int, ...], rank: int) -> bytes:
    """A secret of these ranks: anybody on the host could find their sockets."""
    if rank == ranks[0]:
        store.set(f"token/{ranks[0]}", secrets.token_hex(16))
    return bytes.fromhex(store.get(f"token/{ranks[0]}").decode())


def _call(address: str, deadline: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(max(0.0, deadline - time.monotonic()))
    connection.connect(f"\0{address}")
    return connection


def _say_hello(
    connection: socket.socket, token: bytes, neighbours: Neighbours, rank: int, board: int
) -> None:
    """Hand over this rank's arena; the host's first rank hands over the board as well."""
    arena = neighbours.arena.file
    descriptors = [arena.descriptor, *([board] if rank == neighbours.ranks[0] else [])]
    socket.send_fds(connection, [_HELLO.pack(token, rank, arena.size)], descriptors)


def _hear_hello(connection: socket.socket, token: bytes, neighbours: Neighbours, board: int) -> int:
    """Take over another rank's arena; the descriptor of the board, if that came along."""
    message, descriptors, _, _ = socket.recv_fds(connection, _HELLO.size, 2)
    if len(message) != _HELLO.size or not descriptors:
        raise OSError("a rank of this host gave up")
    said, rank, size = _HELLO.unpack(message)
    if said != token or rank not in neighbours.ranks:
        raise OSError("somebody else called")
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    neighbours.connections[rank] = connection
    neighbours.files[rank] = SharedFile(descriptors[0], size)
    return descriptors[1] if len(descriptors) > 1 else board


def _spins(ranks: int) -> int:
    """How often to look before sleeping: some 50 us where every rank has a core, else hardly."""
    return 2000 if ranks <= len(os.sched_getaffinity(0)) else 20


def helpers_of(ranks: int) -> int:
    """Threads that reduce along with each rank: from its share of the cores, beyond two.

    Those two are for its program and for the kernel's thread. A few helpers read and write as much as the
    memory can; more would only wait.
    """
    cores = len(os.sched_getaffinity(0)) // ranks
    return max(0, min(MOST_HELPERS, cores - 2))
