"""Which backend serves this device, and why; and the one place that brings a process group up.

    choose_device -> choose_backend -> initialize_process_group

One rank and many take the same path: a process that no launcher started gets a
group of one rank over an in-process store, so that nothing leaves the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.comm.forked import spare_parent_in_children
from paceline.comm.native import why_unavailable
from paceline.comm.registration import register
from paceline.environment import RankPlace, cpu_requested, rank_place
from paceline.errors import ArgumentError, BackendUnavailableError, PeerLostError

# The names people may write in ``ddp_backend``; the last three live in plug-ins of
# their vendors or in builds of torch against an MPI library.
KNOWN_BACKENDS = ("nccl", "shm", "gloo", "xccl", "hccl", "cncl", "mpi")


@dataclass(frozen=True)
class BackendChoice:
    """What serves the collectives of this run.

    Attributes:
        name: what ``torch.distributed.init_process_group`` is given, for example
            ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``.
        reason: one sentence for a log line.
    """

    name: str
    reason: str


def choose_device(use_cpu: bool = False) -> torch.device:
    """The device this rank computes on: its own accelerator, or the CPU.

    Args:
        use_cpu: leave accelerators alone. The launcher's ``--cpu`` does the same.

    Raises:
        ArgumentError: this host has fewer accelerators than ranks.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if use_cpu or cpu_requested() or accelerator is None or not _backends_of(accelerator.type):
        return torch.device("cpu")
    place, count = rank_place(), torch.accelerator.device_count()
    if place.local_rank >= count:
        raise ArgumentError(
            f"local rank {place.local_rank} has no device of its own, this host has {count} x "
            f"{accelerator.type}; start at most {count} ranks here, or use the CPU: `paceline launch --cpu`"
        )
    return torch.device(accelerator.type, place.local_rank)


def available_backends(device: torch.device) -> tuple[str, ...]:
    """The backends that can reduce tensors of `device` in this installation."""
    return _backends_of(device.type)


def choose_backend(requested: str | None, device: torch.device) -> BackendChoice:
    """Pick the backend for gradients on `device`.

    An accelerator's own backend is joined with Gloo for CPU tensors, so that
    objects can be exchanged without a detour over the device.

    Args:
        requested: a backend's name, or None for the device's usual one.
        device: where the gradients live.

    Raises:
        BackendUnavailableError: `requested` cannot serve; the text names those that can.
    """
    usable = available_backends(device)
    if requested is not None and requested not in usable:
        why = f" ({why_unavailable()})" if requested == "shm" and why_unavailable() else ""
        raise BackendUnavailableError(
            f"backend {requested!r} cannot serve tensors on {device.type} here{why}; "
            f"available: {', '.join(usable) or 'none'}. Leave ddp_backend out to take the device's usual one"
        )
    if not usable:
        raise BackendUnavailableError(f"this build of torch has no communication backend for {device.type}")
    chosen = requested or usable[0]
    reason = "it was asked for" if requested else f"it is the usual one for {device.type}"
    if device.type == "cpu" or chosen in ("gloo", "mpi") or "gloo" not in _backends_of("cpu"):
        return BackendChoice(chosen, f"{chosen} serves, because {reason}")
    return BackendChoice(
        f"cpu:gloo,{device.type}:{chosen}",
        f"{chosen} serves {device.type}, because {reason}; gloo serves tensors on the CPU",
    )


def initialize_process_group(
    backend: str | None = None,
    *,
    timeout: timedelta = timedelta(seconds=1800),
    device: torch.device | None = None,
) -> BackendChoice:
    """Bring up the default process group, unless one is up already.

    Ranks that a launcher started meet at MASTER_ADDR:MASTER_PORT.

    Args:
        backend: a backend's name, or None for the device's usual one.
        timeout: how long a collective waits for the other ranks before it raises,
            and how long this call waits for them to come up. A group that is up
            already keeps the timeout it was made with.
        device: where gradients live; default: `choose_device()`.

    Returns:
        what serves, on every rank.

    Raises:
        BackendUnavailableError: `backend` cannot serve here.
        ArgumentError: another backend was asked for than the one that is up.
        PeerLostError: the holder of the ranks' store, usually rank 0, ended meanwhile.
    """
    if dist.is_initialized():
        return _group_that_is_up(backend)
    device = device or choose_device()
    choice = choose_backend(backend, device)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    _bring_up(choice.name, timeout, rank_place())
    return choice


def default_store() -> dist.Store | None:
    """The key-value store behind the default group; None where its backend has none (MPI)."""
    try:
        store: dist.Store | None = dist.distributed_c10d._get_default_store()
    except (RuntimeError, ValueError):
        return None
    return store


def _bring_up(name: str, timeout: timedelta, place: RankPlace) -> None:
    spare_parent_in_children()
    if place.world_size == 1:
        dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    try:
        dist.init_process_group(name, timeout=timeout)
    except dist.DistNetworkError as error:
        raise PeerLostError(
            f"rank {place.rank} could not make the process group, because the store where ranks meet was "
            f"lost: {str(error).splitlines()[0]}. Rank 0 holds it, or the launcher: see how that ended"
        ) from error


def _group_that_is_up(requested: str | None) -> BackendChoice:
    name = dist.get_backend_config()
    if requested is not None and requested not in name:
        raise ArgumentError(
            f"ddp_backend is {requested!r}, but a process group with {name!r} is up already; "
            f"leave ddp_backend out, or construct TrainingArguments before calling init_process_group"
        )
    return BackendChoice(name, f"{name} serves, because its process group was up already")


def _backends_of(device_type: str) -> tuple[str, ...]:
    """Registered backends that can move tensors of `device_type`, the usual one first."""
    register()
    # Ranks share memory where they can; shm itself goes through Gloo where they cannot.
    usual = dist.Backend.default_device_backend_map.get(device_type)
    if _can_serve("shm", device_type):
        usual = "shm"
    names = [name for name in dist.Backend.backend_list if _can_serve(name, device_type)]
    return tuple(sorted(names, key=lambda name: (name != usual, name)))


def _can_serve(name: str, device_type: str) -> bool:
    built: dict[str, Callable[[], bool]] = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
        "ucc": dist.is_ucc_available,
        "xccl": dist.is_xccl_available,
        "shm": _has_kernel,
    }
    if name in ("undefined", "fake") or not built.get(name, lambda: True)():
        return False
    return device_type in dist.Backend.backend_capability.get(name, [])


def _has_kernel() -> bool:
    return why_unavailable() is None
