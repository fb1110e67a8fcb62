"""The hosts of a SLURM step, so that ``srun paceline launch train.py`` needs no option for them.

One launcher runs on each host and starts that host's ranks, so srun must start one task per host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from paceline.errors import ArgumentError

_LEAST_PORT, _PORTS = 20000, 10000  # a job's port follows from its number, so that jobs on a host differ


def hosts_of_slurm(environment: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """What srun's variables say about the hosts.

    Args:
        environment: variables of this process.
        given: values by the options' keys that were given otherwise; where hosts are named or counted
            there, srun's word is only checked.

    Returns:
        Values by the options' keys; empty outside of srun and on a single host.

    Raises:
        ArgumentError: srun started more than one launcher on a host, or another number than was asked for.
    """
    if "SLURM_STEP_NUM_TASKS" not in environment or given.get("standalone"):
        return {}
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS")
    hosts = _number(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", default=1)
    if tasks != hosts:
        raise ArgumentError(
            f"srun started {tasks} launchers on {hosts} host(s), but one on each host starts all ranks of "
            f"that host: write srun --ntasks-per-node=1 --nodes={hosts} paceline launch ..."
        )
    if "rdzv_endpoint" in given or "machine_rank" in given:
        return {}
    least, most = given.get("num_machines", (hosts, hosts))
    if not least <= hosts <= most:
        raise ArgumentError(
            f"--num_machines asks for {_span(least, most)} hosts, but srun runs on {hosts}; leave the "
            f"option out, or give srun --nodes={most}"
        )
    if hosts == 1:
        return {}
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    return {
        "num_machines": (least, most),
        "machine_rank": _number(environment, "SLURM_NODEID"),
        "main_process_ip": given.get("main_process_ip", first_host(nodes)),
        "main_process_port": given.get(
            "main_process_port", _LEAST_PORT + _number(environment, "SLURM_JOB_ID", default=0) % _PORTS
        ),
        "rdzv_id": given.get(
            "rdzv_id", f"slurm-{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
        ),
    }


def first_host(nodes: str) -> str:
    """The first name in SLURM's shorthand: ``n[03-05,9],m1`` begins with ``n03``.

    Raises:
        ArgumentError: there is none.
    """
    match = re.match(r"\s*([^,\[\s]+)(?:\[(\d+)[^\]]*\]([^,\[\s]*))?", nodes)
    if match is None:
        raise ArgumentError(
            f"SLURM_STEP_NODELIST is {nodes!r}, which names no host; write --main_process_ip ADDRESS"
        )
    return "".join(part or "" for part in match.groups())


def _number(environment: Mapping[str, str], *names: str, default: int | None = None) -> int:
    for name in names:
        if name in environment:
            if not environment[name].isdigit():
                raise ArgumentError(f"environment variable {name} is {environment[name]!r}, not a number")
            return int(environment[name])
    if default is None:
        raise ArgumentError(
            f"srun did not set {names[0]}; name the hosts with --machine_rank and --main_process_ip"
        )
    return default


def _span(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"
