"""How the launchers of a job agree on who is in it: here, one launcher on one machine.

Note: a fresh store for every attempt
    torch elastic's own handlers keep one TCPStore over all attempts. The ranks of the
    second attempt then find the addresses that the first one left there and dial dead
    processes. So each round gets a store of its own, on a port of its own unless the user
    named one.

Note: the listening socket is ours
    The port is bound here, on 127.0.0.1, and handed to the store: it cannot be lost between
    being found free and being used, is not reachable from outside, and a port that is taken
    is noticed before any rank starts. No machine name is ever looked up.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from paceline.errors import LaunchError

LOOPBACK = "127.0.0.1"


class LocalRendezvous(RendezvousHandler):
    """A job of one machine: its launcher is always group rank 0 of 1.

    Args:
        run_id: unique name of this run.
        port: TCP port of the store, or 0 for a free one in each round.

    Raises:
        LaunchError: (from ``next_rendezvous``) the port cannot be had.
    """

    def __init__(self, run_id: str, port: int) -> None:
        self._run_id = run_id
        self._port = port
        self._store: TCPStore | None = None
        self._closed = False

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = None  # closes the store of the round before, and frees its port
        listener = self._listen()
        port = listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listener.detach(),
        )
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def get_backend(self) -> str:
        return "paceline-local"

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self._store, self._closed = None, True
        return True

    def _listen(self) -> socket.socket:
        try:
            return socket.create_server((LOOPBACK, self._port), backlog=1024)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise LaunchError(
                f"port {self._port} on {LOOPBACK} cannot be used for the ranks to meet: {reason}; "
                f"name another with --main_process_port, or leave it out to take a free one"
            ) from None
