"""The launcher's side of the process that ranks are forked from (``fork_server.py``)."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError
from paceline.launch import fork_server
from paceline.launch.interrupted import Interrupted
from paceline.launch.leash import leash

_STEP = 0.2  # seconds between two looks at what the launcher was told, while the server works


class ForkServer:
    """Starts the server, and asks it for ranks and stores.

    Args:
        program: kind ("script" or "module"), name and arguments of what the ranks run.
        environment: what all ranks share.
        interrupted: asked while waiting; true raises ``Interrupted`` there.
    """

    def __init__(
        self, program: Sequence[str], environment: Mapping[str, str], interrupted: Callable[[], bool]
    ) -> None:
        ours, theirs = socket.socketpair()
        self._connection, self._interrupted = ours, interrupted
        self._received = b""
        self._answers: deque[dict[str, Any]] = deque()
        self._endings: dict[int, int] = {}
        self._stores: list[int] = []
        self._obstacle: str | None = None
        self._greeted = self._lost = False
        command = [
            sys.executable,
            "-u",
            fork_server.__file__,
            str(theirs.fileno()),
            str(Path(fork_server.__file__).parents[2]),
            *program,
        ]
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                preexec_fn=leash(),
            )
        finally:
            theirs.close()
        self.pid = self._process.pid

    def obstacle(self) -> str | None:
        """Why ranks should not be forked, or None; waits until the server knows."""
        if not self._greeted:
            self._obstacle = self._answer()["obstacle"]
            self._greeted = True
        return self._obstacle

    def fork(
        self, program: Sequence[str], environment: Mapping[str, str], streams: Sequence[int], told: Path
    ) -> int:
        """Fork one rank.

        Args:
            program: kind, name and arguments of what it runs.
            environment: its whole environment.
            streams: descriptors of its stdin, stdout and stderr.
            told: the file in which it is to tell how its script ended.

        Returns:
            The number of its process, which stays until ``reap``.

        Raises:
            OSError: this host allows no more processes.
            LaunchError: the server is gone.
        """
        self.obstacle()  # waited for here, where a signal is noticed
        kind, name, *arguments = program
        self._send({"do": "fork", "kind": kind, "name": name, "arguments": arguments,
                    "environment": dict(environment), "told": str(told)}, streams)  # fmt: skip
        return int(self._answer()["pid"])

    def open_store(self, listener: socket.socket, address: str) -> None:
        """Have a TCPStore on a listening socket, which is closed here, as soon as the server can."""
        request = {"do": "store", "address": address, "port": listener.getsockname()[1]}
        with listener:
            self._send(request, [listener.fileno()])

    def close_stores(self) -> None:
        """End all stores; their ports are free again when this returns."""
        self._send({"do": "end_stores"}, [])
        self.obstacle()  # a greeting that was not yet read comes before the answer
        self._answer()
        self._stores.clear()

    def processes(self) -> list[int]:
        """The server and its stores, which outlive an attempt."""
        self._read(0)
        return [self.pid, *self._stores]

    def ending(self, pid: int) -> int | None:
        """How a forked rank ended (its exit status, or minus a signal's number); None while it runs."""
        self._read(0)
        if pid in self._endings:
            return self._endings[pid]
        return -signal.SIGKILL if self._lost and not _exists(pid) else None

    def reap(self, pid: int) -> None:
        """Let go of an ended rank; its number may be given out again from here on."""
        self._tell({"do": "reap", "pid": pid})

    def close(self) -> None:
        """End the server, and with it whatever it forked."""
        self._connection.close()
        if not self._greeted:  # it may be busy for seconds, importing torch
            self._process.kill()
        try:
            self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, request: Mapping[str, Any]) -> None:
        """Ask for something that needs no answer; a server that is gone has done it."""
        if not self._lost:
            try:
                self._send(request, [])
            except LaunchError:
                self._lost = True

    def _send(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        body = json.dumps(request).encode()
        try:
            socket.send_fds(self._connection, [f"{len(body):0{fork_server.HEADER}}".encode()], descriptors)
            self._connection.sendall(body)
        except OSError:
            raise self._gone() from None

    def _answer(self) -> dict[str, Any]:
        while not self._answers:
            self._read(_STEP)
            if self._interrupted():
                raise Interrupted
            if self._lost and not self._answers:
                raise self._gone()
        answer = self._answers.popleft()
        if "refused" in answer:
            raise OSError(answer["refused"], os.strerror(answer["refused"]))
        return answer

    def _read(self, seconds: float) -> None:
        """Take in what the server said, waiting for it a little."""
        deadline = time.monotonic() + seconds
        while not self._lost:
            ready, _, _ = select.select([self._connection], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            try:
                data = self._connection.recv(1 << 16)
            except ConnectionError:
                data = b""
            self._lost = not data
            self._received += data
            *lines, self._received = self._received.split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "ended" in message:
                    self._endings[message["ended"]] = message["code"]
                elif "store" in message:
                    self._stores.append(message["store"])
                else:
                    self._answers.append(message)
            if self._answers:
                return

    def _gone(self) -> LaunchError:
        self._lost = True
        try:
            status = f"exit status {self._process.wait(timeout=1)}"
        except subprocess.TimeoutExpired:
            status = "it closed its connection"
        return LaunchError(
            f"the process that imports torch and from which ranks are forked ended ({status}); what it said "
            f"is above. --start_method spawn starts each rank as a Python of its own"
        )


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
