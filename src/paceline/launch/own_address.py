"""Ranks may meet at an address of their own: ``tcp://host:port``, or a MASTER_PORT that the script sets.

Under a launcher PyTorch takes any address for that of the launcher's store, so no rank opens one, and all
wait for it until the timeout. Here rank 0 opens the store where the address is not the launcher's, as it
does without a launcher.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

_CREATE = "_create_c10d_store"


def let_ranks_meet_elsewhere(launchers_port: int) -> None:
    """From now on, rank 0 of this process's rendezvous serves every port but the launcher's.

    It replaces a function of PyTorch's rendezvous, so this is for processes that paceline started;
    ``torch.distributed`` has been imported.

    Args:
        launchers_port: where the launcher keeps the store of this round (MASTER_PORT).
    """
    rendezvous = sys.modules["torch.distributed.rendezvous"]
    setattr(rendezvous, _CREATE, _served_by_rank_0(getattr(rendezvous, _CREATE), launchers_port))


def _served_by_rank_0(create: Callable[..., Any], launchers_port: int) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_store(
        hostname: str, port: int, rank: int, world_size: int, timeout: Any, use_libuv: bool = True
    ) -> Any:
        if port == launchers_port:
            return create(hostname, port, rank, world_size, timeout, use_libuv)
        from torch.distributed import TCPStore  # here: the launcher, which shares this folder, has no torch

        return TCPStore(
            hostname, port, world_size, rank == 0, timeout, multi_tenant=True, use_libuv=use_libuv
        )

    return create_store
