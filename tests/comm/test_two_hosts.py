"""Two hosts with two ranks each: network namespaces that nothing but a cable connects."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
ALL_ALIKE = {
    "all_reduce": [10.0],
    "broadcast": [4.0],
    "all_gather": [1.0, 2.0, 3.0, 4.0],
    # From each root: 8 times its rank + 1, its rank, three times true, nothing.
    # Gathered, each times its place: 3 times a rank + 1, 4 times a rank, nothing.
    "odd": [
        *(x for root in range(4) for x in (8.0 * (root + 1), float(root), 3.0, 0.0)),
        sum((place // 3 + 1.0) * (place + 1) for place in range(12)),
        sum((place // 4) * (place + 1.0) for place in range(16)),
        0.0,
    ],
}


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    names = [f"paceline{os.getpid()}-{host}" for host in range(2)]
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces take root and iproute2")
    try:
        lay_cable(names)
    except subprocess.CalledProcessError as error:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    yield names
    for name in names:
        ip("netns", "del", name)


def lay_cable(names: list[str]) -> None:
    for name in names:
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
    ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
    for host, name in enumerate(names):
        ip("-n", name, "addr", "add", f"10.91.0.{host + 1}/24", "dev", "cable")
        ip("-n", name, "link", "set", "cable", "up")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)


def outcomes(folder: Path, host_of_rank: list[list[str]]) -> list[dict[str, Any]]:
    """What each rank found; `host_of_rank` holds what its command begins with."""
    folder.mkdir()
    size = len(host_of_rank)
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.comm.two_hosts", str(rank), str(size), str(folder)],
            cwd=REPOSITORY,
            env=variables | ({"GLOO_SOCKET_IFNAME": "cable"} if prefix else {}),
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank, prefix in enumerate(host_of_rank)
    ]
    try:
        errors = [rank.communicate(timeout=90)[1] for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
                rank.communicate()
    assert [rank.returncode for rank in ranks] == [0] * size, errors
    return [json.loads((folder / f"rank{rank}").read_text()) for rank in range(size)]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_hosts_train_like_one(hosts: list[str], tmp_path: Path) -> None:
    on_host = [["ip", "netns", "exec", hosts[rank // 2]] for rank in range(4)]
    two = outcomes(tmp_path / "two", on_host)
    one = outcomes(tmp_path / "one", [[]] * 4)
    assert "ranks 0, 1 share memory; ranks 2, 3 share memory" in (tmp_path / "two" / "log0").read_text()
    assert "ranks 0, 1, 2, 3 share memory" in (tmp_path / "one" / "log0").read_text()
    for found in (two, one):
        for rank, outcome in enumerate(found):
            assert outcome["weights"] == found[0]["weights"]  # bit for bit
            assert max(outcome["difference"].values()) < 1e-6  # from one process on the joined batch
            assert outcome["collectives"] == ALL_ALIKE | {
                "reduce_scatter": [10.0 * rank],
                "all_to_all": [(rank + 1) * (other + 1.0) for other in range(4)],
            }
