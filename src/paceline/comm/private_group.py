"""Process groups that nothing else uses.

Note "a group of its own": collectives of one group must be issued in one order on all ranks. What
is issued when a gradient is there cannot promise that towards collectives of others: of the
user's, of another wrapper's in the same backward, or of a layer that exchanges statistics. In
a group that nothing else uses it only has to keep its own order.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _world

from paceline.comm.forked import spare_parent_in_children
from paceline.comm.waiting import Peers


def private_group(
    base: dist.ProcessGroup, device: torch.device, purpose: str, owner: object
) -> dist.ProcessGroup:
    """A new group of the same ranks, in the same order, with the same backend and timeout.

    Args:
        base: the ranks that take part; all of them must come here together.
        device: of the tensors that will travel.
        purpose: what debugging tools show for the group.
        owner: the group is destroyed with it, where that is safe; else it goes with the process.

    Returns:
        The new group; ``base`` itself where no other group can be made of its ranks: they are one alone,
        the backend is MPI, or torch.distributed does not know ``base``.
    """
    spare_parent_in_children()
    if dist.get_world_size(base) == 1 or base not in _world.pg_map:
        return base
    backend = _backend_for(base, device)
    if backend == dist.Backend.MPI:
        return base
    ranks = dist.get_process_group_ranks(base)
    all_ranks = ranks == list(range(dist.get_world_size()))
    group: dist.ProcessGroup = dist.new_group(
        ranks,
        timeout=timeout_of(base, device),
        backend=backend,
        use_local_synchronization=not all_ranks,
        group_desc=f"paceline:{purpose}",
        sort_ranks=False,
    )
    # An accelerator's group may still have work in flight. And torch names a group of some ranks by how
    # many groups there are: were one destroyed, its name, and what stands in the store, would come again.
    if device.type == "cpu" and all_ranks:
        _wait_for_all(group, purpose)
        weakref.finalize(owner, _destroy, group, os.getpid()).atexit = False
    return group


def _wait_for_all(group: dist.ProcessGroup, purpose: str) -> None:
    """Or a rank could destroy the group while another is still connecting to it."""
    work = dist.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu"), group=group, async_op=True)
    Peers(group).wait(work, lambda: f"making a process group for {purpose}")


def _destroy(group: dist.ProcessGroup, maker: int) -> None:
    if os.getpid() == maker and group in _world.pg_map:  # else all groups were destroyed together
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group(group)


def _backend_for(group: dist.ProcessGroup, device: torch.device) -> str:
    backends = dist.BackendConfig(dist.Backend(dist.get_backend_config(group))).get_device_backend_map()
    return str(backends[device.type])


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """How long the group's collectives wait on this device; None where its backend does not say."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


def longest_timeout(group: dist.ProcessGroup) -> timedelta:
    """How long the group's collectives wait at most, on any device."""
    known = [timeout_of(group, device) for device in group._device_types]
    return max((timeout for timeout in known if timeout is not None), default=default_pg_timeout)
