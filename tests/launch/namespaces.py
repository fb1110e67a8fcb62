"""Two make-believe hosts: network namespaces of this machine, joined by a cable that can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def may_make_namespaces() -> bool:
    """Whether this machine lets us (root, and iproute2)."""
    if os.geteuid() or not shutil.which("ip"):
        return False
    name = f"pl{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        _ip("netns", "del", name)
    return made


class Cable:
    """Two hosts, 0 and 1, and what can be done to the cable between them."""

    def __init__(self) -> None:
        mark = uuid.uuid4().hex[:6]
        self.names = [f"pl{mark}a", f"pl{mark}b"]
        self.addresses = ["10.79.0.1", "10.79.0.2"]

    def command(self, host: int, *words: str) -> list[str]:
        """The words to run a command on a host."""
        return ["ip", "netns", "exec", self.names[host], *words]

    def set(self, state: str) -> None:
        """``down`` cuts the cable, ``up`` mends it."""
        _ip("-n", self.names[1], "link", "set", "cable", state)


@contextmanager
def two_hosts() -> Iterator[Cable]:
    """The hosts, and nothing left of them afterwards."""
    cable = Cable()
    try:
        for name in cable.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip(
            "-n",
            cable.names[0],
            "link",
            "add",
            "cable",
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
            cable.names[1],
        )
        for name, address in zip(cable.names, cable.addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
        yield cable
    finally:
        for name in cable.names:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, check=True)
