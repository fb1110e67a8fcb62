"""The environment variables that a rank is started with.

Scripts written for torchrun or for Accelerate's launcher read these, so both sets are
there, under their names.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.environment import RECORDS


@dataclass(frozen=True)
class RankSeat:
    """One rank's place in the job, as the rendezvous gave it out."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    group_rank: int = 0
    group_world_size: int = 1


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of one attempt find each other."""

    run_id: str
    master_addr: str
    master_port: int
    attempt: int
    max_restarts: int
    store_is_kept: bool = True
    interface: str | None = None


def shared_environment(
    inherited: Mapping[str, str],
    variables: Mapping[str, str],
    *,
    local_world_size: int,
    use_cpu: bool,
    single_host: bool,
    run_id: str,
) -> dict[str, str]:
    """What the environments of all ranks of this host have in common, in all attempts.

    Args:
        inherited: the launcher's own environment.
        variables: those that options set.
        local_world_size: ranks of this host.
        use_cpu: no accelerator is to be used (asked for, or there is none).
        single_host: all ranks are on this host.
        run_id: the run's mark.
    """
    environment = dict(inherited)
    environment.update(_accelerate_variables(inherited, use_cpu))
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    environment.setdefault("OMP_NUM_THREADS", str(threads_per_rank(local_world_size)))
    environment.update(variables)
    environment["TORCHELASTIC_RUN_ID"] = run_id
    if single_host:
        _keep_gloo_on_loopback(environment)
    return environment


def rank_environment(
    shared: Mapping[str, str],
    seat: RankSeat,
    meeting: Meeting,
    *,
    role: str = "default",
    error_file: str,
    records: str = "off",
) -> dict[str, str]:
    """The whole environment of one rank: what all share, and the rank's place on top.

    Args:
        shared: see ``shared_environment``.
        seat: which rank this is.
        meeting: where the ranks meet, and in which attempt.
        role: the ranks' ROLE_NAME.
        error_file: where `torch.distributed.elastic`'s ``@record`` writes an exception.
        records: folder where it records what it does.
    """
    environment = {**shared, **_torchrun_variables(seat, meeting, role, error_file)}
    environment[RECORDS] = "off" if shared.get(RECORDS) == "off" else records
    if meeting.interface is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", meeting.interface)
    return environment


def threads_per_rank(local_world_size: int) -> int:
    """Cores this process may use, shared out among the ranks of this machine; at least 1."""
    return max(1, usable_cores() // local_world_size)


def usable_cores() -> int:
    """Number of cores this process may run on (a container or taskset may allow fewer than there are)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _torchrun_variables(seat: RankSeat, meeting: Meeting, role: str, error_file: str) -> dict[str, str]:
    return {
        "RANK": str(seat.rank),
        "LOCAL_RANK": str(seat.local_rank),
        "WORLD_SIZE": str(seat.world_size),
        "LOCAL_WORLD_SIZE": str(seat.local_world_size),
        "GROUP_RANK": str(seat.group_rank),
        "GROUP_WORLD_SIZE": str(seat.group_world_size),
        "ROLE_NAME": role,
        "ROLE_RANK": str(seat.rank),
        "ROLE_WORLD_SIZE": str(seat.world_size),
        "MASTER_ADDR": meeting.master_addr,
        "MASTER_PORT": str(meeting.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(meeting.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(meeting.max_restarts),
        "TORCHELASTIC_RUN_ID": meeting.run_id,
        # The launcher holds the store from before the first rank starts until after the last one
        # ends: no rank has to win a race for the port, and rank 0 may leave first.
        "TORCHELASTIC_USE_AGENT_STORE": str(meeting.store_is_kept),
        "TORCHELASTIC_ERROR_FILE": error_file,
    }


def _accelerate_variables(inherited: Mapping[str, str], use_cpu: bool) -> dict[str, str]:
    """What ``accelerate launch`` sets when no option of its own is given (``script_variables`` has the rest).

    It also sets KMP_AFFINITY where it starts one process on the CPU. With several ranks that
    would pin all of them to the same first cores, so it is left out here.
    """
    defaults = {
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
    }
    variables = {name: inherited.get(name, value) for name, value in defaults.items()}
    if use_cpu:
        variables["ACCELERATE_USE_CPU"] = "true"
    return variables


def _keep_gloo_on_loopback(environment: dict[str, str]) -> None:
    """All ranks are on this machine, so Gloo need not look up (and wait for) the machine's name."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback:
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
