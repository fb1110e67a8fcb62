"""The process that ranks are forked from: it imports torch once, for all of them.

    launcher                                   this process
    starts it, holds a socket to it       ->   imports torch; says whether it may fork
    "fork", environment, stdin/out/err    ->   forks: the child becomes the rank; answers with its pid
                                          <-   "ended", pid, status; the rank stays a zombie until "reap"
    "store", a listening socket           ->   forks a child that is the ranks' TCPStore until "end_stores"
    ends, in any way                      ->   end of the socket: ends, and the kernel ends the ranks

Note: what a rank must not notice
    The environment the ranks share is this process's own from the start, so that whatever reads
    it when torch is imported reads the right values. A child then gets the rest: its own
    environment, standard streams, session, signal handlers, ``sys.path``, a ``__main__`` of its
    own, and fresh seeds where a library seeded itself from the system. No accelerator has a
    context here, no other thread runs, and no name in the script's folder may be one that is
    already imported here; else the launcher starts each rank as a Python of its own.

Note: the store has a process of its own
    A TCPStore serves from a thread, and a process with threads should not be forked.

Runs as a script; standard library, torch and what it borrows from paceline only.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import sys
import threading
import types
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

HEADER = 8  # bytes: length of the message that follows, as text
_PR_SET_PDEATHSIG = 1


@dataclass
class _Rank:
    """What a forked child is to become."""

    request: dict[str, Any]
    streams: list[int]


class _Server:
    """Answers requests, and knows which of its children are ranks and which are stores."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        self._ranks: set[int] = set()
        self._stores: set[int] = set()

    def serve(self) -> _Rank | None:
        """Until the launcher is gone. Returns a rank in a forked child that is to become one."""
        while True:
            sources: list[Any] = [self._connection, self._wake_reader]
            ready, _, _ = select.select(sources, [], [])
            if self._wake_reader in ready:
                _drain(self._wake_reader)
                self._report_endings()
            if self._connection in ready:
                request, descriptors = _receive(self._connection)
                if request is None:
                    return None
                if request["do"] in ("fork", "store"):
                    rank = self._fork(request, descriptors)
                    if rank is not None:
                        return rank
                elif request["do"] == "reap":
                    os.waitpid(request["pid"], 0)
                else:
                    self._end_stores()

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> _Rank | None:
        parent = os.getpid()
        pid = self._try_to_fork()
        if pid == 0:
            _become_child(parent, (self._connection.detach(), self._wake_reader, self._wake_writer))
            if request["do"] == "store":
                _be_store(request, descriptors[0])
            return _Rank(request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid is not None:
            (self._ranks if request["do"] == "fork" else self._stores).add(pid)
            _say(self._connection, **{"pid" if request["do"] == "fork" else "store": pid})
        return None

    def _try_to_fork(self) -> int | None:
        try:
            return os.fork()
        except OSError as error:  # this host allows no more processes, or has no more memory
            _say(self._connection, refused=error.errno)
            return None

    def _end_stores(self) -> None:
        while self._stores:
            pid = self._stores.pop()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        _say(self._connection, stores_ended=True)

    def _report_endings(self) -> None:
        for pid in sorted(self._ranks):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                self._ranks.discard(pid)
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                _say(self._connection, ended=pid, code=code)


def _obstacle(folder: str) -> str | None:
    """Why ranks should not be forked from here; None when they may."""
    if threading.active_count() > 1:
        return "importing torch started a thread"
    for device in ("cuda", "xpu"):
        backend = getattr(sys.modules["torch"], device, None)
        if backend is not None and backend.is_initialized():
            return f"importing torch opened a {device} device"
    imported = {name.partition(".")[0] for name in sys.modules} - {"__main__"}
    hidden = sorted(imported & _modules_in(folder))
    if hidden:
        return f"{folder} has a module of the name {hidden[0]}, which is imported here already"
    return None


def _modules_in(folder: str) -> set[str]:
    """Names of the modules and packages that lie in a folder."""
    with os.scandir(folder) as entries:
        return {
            entry.name.partition(".")[0]
            for entry in entries
            if entry.name.endswith((".py", ".so", ".pyc"))
            or os.path.exists(os.path.join(folder, entry.name, "__init__.py"))
        }


def _say(connection: socket.socket, **message: Any) -> None:
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except BrokenPipeError:
        pass  # the launcher is gone, as will be read from the connection next


def _receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    try:
        header, descriptors, _, _ = socket.recv_fds(connection, HEADER, 3)
    except ConnectionResetError:  # it left before it had read all that was said
        header = b""
    if not header:
        return None, []
    while len(header) < HEADER:
        header += connection.recv(HEADER - len(header))
    left, parts = int(header), []
    while left:
        part = connection.recv(min(left, 1 << 16))
        if not part:
            return None, []
        parts.append(part)
        left -= len(part)
    return json.loads(b"".join(parts)), list(descriptors)


def _drain(pipe: int) -> None:
    try:
        while os.read(pipe, 4096):
            pass
    except BlockingIOError:
        pass


def _become_child(parent: int, inherited: tuple[int, ...]) -> None:
    """Leave behind what belongs to the server; die with it."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in inherited:
        os.close(descriptor)


def _be_store(request: dict[str, Any], listener: int) -> None:
    """Serve the ranks' TCPStore on a listening socket until killed."""
    from torch.distributed import TCPStore

    store = TCPStore(
        request["address"],
        request["port"],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener,
    )
    while store is not None:
        signal.pause()


def _prepare(rank: _Rank, environment: Any) -> None:
    """Make the child look like a Python that was just started."""
    for target, descriptor in enumerate(rank.streams):
        os.dup2(descriptor, target)
        os.close(descriptor)
    before, values = environment.snapshot(), rank.request["environment"]
    environment.replace_variables(values)
    threads = values.get("OMP_NUM_THREADS", "")
    if threads != before.get("OMP_NUM_THREADS") and threads.isdigit() and int(threads) > 0:
        sys.modules["torch"].set_num_threads(int(threads))
    _open_standard_streams()
    # Both drew from the system's entropy when they were imported, once for all ranks.
    sys.modules["numpy.random"].seed()
    sys.modules["torch"].default_generator.seed()


def _open_standard_streams() -> None:
    """As ``python -u`` opens them: unbuffered, in the encodings it chose for this process."""
    keyboard = io.FileIO(0, "r", closefd=False)
    keyboard.name = "<stdin>"
    sys.stdin = io.TextIOWrapper(io.BufferedReader(keyboard), sys.stdin.encoding, sys.stdin.errors)
    sys.stdin.mode = "r"  # type: ignore[misc]
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        raw = io.FileIO(number, "w", closefd=False)
        raw.name = f"<{name}>"
        text = io.TextIOWrapper(
            raw,
            old.encoding,
            old.errors,
            write_through=True,
            line_buffering=raw.isatty(),
        )
        text.mode = "w"  # type: ignore[misc]
        setattr(sys, name, text)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))


def _borrow(source: str, *names: str) -> list[types.ModuleType]:
    """Import modules of paceline without leaving a trace: the script may have a paceline of its own."""
    sys.path.insert(0, source)
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(source)
        for name in [name for name in sys.modules if name.partition(".")[0] == "paceline"]:
            del sys.modules[name]


def _main(descriptor: str, source: str, kind: str, name: str, *_: str) -> None:
    """Serve, and in each forked child become the rank.

    Args:
        descriptor: number of the socket to the launcher.
        source: the folder that has paceline.
        kind, name: what the ranks run, here only for whoever lists processes, and to look at its folder.
    """
    if not sys.flags.safe_path:
        sys.path[0] = "/nonexistent"  # not this folder, whose modules have common names
    gc.disable()  # importing torch makes a million objects and no garbage to speak of
    environment, rank_main, own_address, recorder, leaving = _borrow(
        source,
        "paceline.environment",
        "paceline.launch.rank_main",
        "paceline.launch.own_address",
        "paceline.recorder.ring",
        "paceline.comm.leaving",
    )
    for module in ("torch.distributed", "numpy.random"):
        importlib.import_module(module)
    gc.freeze()  # so that collections in the ranks do not touch, and thereby copy, these pages
    gc.enable()
    folder = os.getcwd() if kind == "module" else os.path.dirname(os.path.realpath(name))
    connection = socket.socket(fileno=int(descriptor))
    connection.set_inheritable(False)
    server = _Server(connection)
    _say(connection, obstacle=_obstacle(folder))
    rank = server.serve()
    if rank is None:
        os._exit(0)
    _prepare(rank, environment)
    request = rank.request
    over = recorder.observe()
    leaving.let_gloo_rest_before_leaving()
    leaving.let_gloo_rest_before_groups_end()
    own_address.let_ranks_meet_elsewhere(int(request["environment"]["MASTER_PORT"]))
    program = (request["kind"], request["name"], *request["arguments"])
    rank_main.run(request["told"], *program, hide=(__file__,), script_is_over=over)


if __name__ == "__main__":
    _main(*sys.argv[1:])
