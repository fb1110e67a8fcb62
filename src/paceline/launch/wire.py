"""Lines of JSON between the launchers of several hosts, and what they know of each other's silence."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from typing import Any

PROTOCOL = "paceline-launch-2"
BEAT = 1.0  # seconds between two signs of life
_SEND_LIMIT = 2.0  # seconds a message may take to leave
_LINE_LIMIT = 1 << 24  # bytes; nobody who means us sends more in a line
_SIOCGIFADDR = 0x8915


class Connection:
    """A connection to another launcher. Several threads may send; one receives.

    Args:
        sock: connected; owned by this object.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.settimeout(_SEND_LIMIT)
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        self._sending = threading.Lock()
        self.heard_at = time.monotonic()
        self.closed = False

    def fileno(self) -> int:
        """For ``select``."""
        return self._socket.fileno()

    def silent_for(self) -> float:
        """Seconds since the last word."""
        return time.monotonic() - self.heard_at

    def send(self, **message: Any) -> None:
        """Send one message; a connection that cannot take it is closed from here on."""
        line = json.dumps({**message, "now": time.monotonic()}).encode() + b"\n"
        try:
            with self._sending:
                if not self.closed:
                    self._socket.sendall(line)
        except TimeoutError:
            pass  # the other side hears nothing either: its silence will tell
        except OSError:
            self.closed = True

    def receive(self) -> list[dict[str, Any]]:
        """The messages that are there; call it when there is something to read."""
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            data = b""
        if not data:
            self.closed = True
            return []
        self.heard_at = time.monotonic()
        self._received += data
        *lines, self._received = self._received.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            messages = [None]
        if len(self._received) > _LINE_LIMIT or not all(isinstance(message, dict) for message in messages):
            self.closed = True  # somebody else's protocol
            return []
        return messages

    def address(self) -> str:
        """Our own address on this connection."""
        return str(self._socket.getsockname()[0])

    def close(self) -> None:
        """Close it; also when it is closed already."""
        self.closed = True
        self._socket.close()


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address; None when none is found."""
    import fcntl  # here: not there on every system, and not needed for a single host

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def is_ours(address: str) -> bool:
    """Whether an address or name is one of this host."""
    try:
        infos = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, number, _, where in infos:
        try:
            with socket.socket(family, kind, number) as probe:
                probe.bind(where)
                return True
        except OSError:
            continue
    return False
