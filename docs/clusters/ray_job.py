"""Starts a training on the hosts of a Ray cluster: `ray job submit -- python ray_job.py train.py --epochs 3`.

One task on each host runs `paceline launch` there; Ray finds the hosts and brings the output back.
"""

import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

HOSTS, RANKS_PER_HOST = 2, 4


@ray.remote
def address_and_port() -> tuple[str, int]:
    """Of the main host; the port is free now and, with luck, a second later."""
    with socket.create_server(("", 0)) as free:
        return ray.util.get_node_ip_address(), free.getsockname()[1]


@ray.remote(max_retries=0)
def launch(machine_rank: int, address: str, port: int, script: list[str]) -> int:
    """Run this host's launcher to its end, and return its exit status."""
    options = [
        f"--num_machines={HOSTS}",
        f"--machine_rank={machine_rank}",
        f"--main_process_ip={address}",
        f"--main_process_port={port}",
        f"--nproc_per_node={RANKS_PER_HOST}",
    ]
    return subprocess.run(
        [sys.executable, "-m", "paceline", "launch", *options, *script], check=False
    ).returncode


def main(script: list[str]) -> int:
    """Reserve the hosts, start a launcher on each, and return the worst exit status."""
    ray.init()
    group = placement_group([{"CPU": RANKS_PER_HOST}] * HOSTS, strategy="STRICT_SPREAD")
    ray.get(group.ready())

    def on(host: int) -> dict[str, object]:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=host)
        return {"num_cpus": RANKS_PER_HOST, "scheduling_strategy": strategy}

    address, port = ray.get(address_and_port.options(**on(0)).remote())
    tasks = [launch.options(**on(host)).remote(host, address, port, script) for host in range(HOSTS)]
    return max(ray.get(tasks))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
