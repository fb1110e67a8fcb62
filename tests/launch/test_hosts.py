"""Launchers of several hosts: here on one machine, and in network namespaces where those can be made."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from paceline.launch.wire import interface_of, is_ours
from tests.launch.launching import (
    LIMIT,
    command,
    descendants,
    environment,
    kill,
    pids_in,
    script,
    started,
    still_alive,
    wait_for,
)
from tests.launch.namespaces import may_make_namespaces, two_hosts

PLACE = """
import os, sys, time
rank, folder, attempt = os.environ["RANK"], os.environ["FOLDER"], os.environ["TORCHELASTIC_RESTART_COUNT"]
world_size, host = os.environ["WORLD_SIZE"], os.environ["GROUP_RANK"]
with open(f"{folder}/new_{rank}", "w") as file: file.write(str(os.getpid()))
os.rename(f"{folder}/new_{rank}", f"{folder}/pid_{attempt}_{rank}_of_{world_size}")
"""
WAIT = "time.sleep(300)\n"
ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print("sum", total.item(), os.environ["GLOO_SOCKET_IFNAME"])
"""


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


@contextmanager
def hosts(folder: Path, text: str, *words: str, ranks: str = "1") -> Iterator[list[subprocess.Popen[str]]]:
    """Two launchers that meet on this machine."""
    where = ["--nnodes=2", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    where.append(f"--nproc_per_node={ranks}")
    job = script(folder, PLACE + text)
    with ExitStack() as stack:
        yield [
            stack.enter_context(started(*where, f"--node_rank={rank}", *words, job, FOLDER=str(folder)))
            for rank in range(2)
        ]


def ends(launches: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    found = []
    for launch in launches:
        out, err = launch.communicate(timeout=LIMIT)
        found.append((launch.returncode, out, err))
    return found


def started_ranks(folder: Path, attempt: int, world_size: int) -> list[Path]:
    return [folder / f"pid_{attempt}_{rank}_of_{world_size}" for rank in range(world_size)]


def test_ranks_of_two_hosts_meet(tmp_path: Path) -> None:
    with hosts(tmp_path, ALL_REDUCE, ranks="2") as launches:
        (zero, out0, err0), (one, out1, err1) = ends(launches)
    assert (zero, one) == (0, 0), err0 + err1
    assert sorted(out0.splitlines()) == ["[rank0]: sum 10.0 lo", "[rank1]: sum 10.0 lo"]
    assert sorted(out1.splitlines()) == ["[rank2]: sum 10.0 lo", "[rank3]: sum 10.0 lo"]


def test_every_host_shows_the_same_report_and_ends_with_the_same_status(tmp_path: Path) -> None:
    with hosts(tmp_path, "if rank == '1':\n    raise KeyError('mine')\n" + WAIT) as launches:
        (zero, _, err0), (one, _, err1) = ends(launches)
    assert (zero, one) == (1, 1)
    for err in (err0, err1):
        assert err.splitlines()[-1] == "[rank1]: KeyError: 'mine'"
        assert "rank 1 on " in err and "failed first (exit code 1, pid " in err
    assert still_alive(pids_in(tmp_path), within=0) == []


@pytest.mark.slow
def test_all_start_again_after_a_failure_on_one(tmp_path: Path) -> None:
    text = (
        ALL_REDUCE
        + "if rank == '1' and attempt == '0':\n    os.kill(os.getpid(), 9)\ndist.all_reduce(total)\n"
    )
    with hosts(tmp_path, text, "--max_restarts=1") as launches:
        (zero, _, err0), (one, _, err1) = ends(launches)
    assert (zero, one) == (0, 0), err0 + err1
    assert "starting all ranks again (attempt 2 of 2)" in err0 and "(attempt 2 of 2)" in err1
    assert all(path.exists() for path in started_ranks(tmp_path, 1, 2))


@pytest.mark.parametrize(
    ("host", "others"), [(0, "the main host 127.0.0.1: its launcher ended"), (1, "its launcher ended")]
)
def test_a_killed_launcher_ends_the_other_host(tmp_path: Path, host: int, others: str) -> None:
    with hosts(tmp_path, WAIT) as launches:
        wait_for(started_ranks(tmp_path, 0, 2), launches[1 - host])
        launches[host].kill()
        status, _, err = ends([launches[1 - host]])[0]
    assert status == 1
    assert "lost a host: " in err and others in err
    assert still_alive(pids_in(tmp_path)) == []


def test_a_signal_on_one_host_ends_all(tmp_path: Path) -> None:
    with hosts(tmp_path, WAIT) as launches:
        wait_for(started_ranks(tmp_path, 0, 2), launches[0])
        launches[1].send_signal(signal.SIGTERM)
        results = ends(launches)
    for status, _, err in results:
        assert status == 143
        assert "ended by SIGTERM (on " in err
    assert still_alive(pids_in(tmp_path), within=0) == []


def test_who_waits_says_so_and_can_be_told_to_end(tmp_path: Path) -> None:
    where = ["--nnodes=2", "--node_rank=0", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    with started(*where, script(tmp_path, "")) as launch:
        assert launch.stderr is not None
        line = launch.stderr.readline()
        assert "waiting for hosts: 1 of 2 came" in line and "machine_rank 1 is missing" in line
        launch.send_signal(signal.SIGINT)
        launch.communicate(timeout=LIMIT)
    assert launch.returncode == 130


def test_a_taken_port_and_a_missing_main_host_are_errors(tmp_path: Path) -> None:
    job = script(tmp_path, "")
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        where = ["--nnodes=2", "--master_addr=127.0.0.1", f"--master_port={port}"]
        with started(*where, "--node_rank=0", job) as launch:
            _, err = launch.communicate(timeout=LIMIT)
        assert launch.returncode == 1 and f"port {port} of this host" in err
    with started(*where, "--node_rank=1", "--rdzv_conf=timeout=1", job) as launch:
        _, err = launch.communicate(timeout=LIMIT)
    assert launch.returncode == 1
    assert f"the main host 127.0.0.1:{port} was not there within 1 s: Connection refused" in err


def test_the_tasks_of_a_slurm_step_find_each_other(tmp_path: Path) -> None:
    job = script(tmp_path, PLACE + "print(world_size, host)")
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "localhost"}
    step |= {"SLURM_JOB_ID": str(os.getpid()), "FOLDER": str(tmp_path)}
    with ExitStack() as stack:
        launches = [
            stack.enter_context(started("--nproc_per_node=1", job, **step, SLURM_NODEID=str(node)))
            for node in range(2)
        ]
        (zero, out0, err0), (one, out1, err1) = ends(launches)
    assert (zero, out0, one, out1) == (0, "[rank0]: 2 0\n", 0, "[rank1]: 2 1\n"), err0 + err1


@pytest.mark.slow
def test_an_elastic_job_takes_a_host_in_and_lets_it_go(tmp_path: Path) -> None:
    conf = "--rdzv_conf=last_call_timeout=0"
    where = ["--num_machines=1:2", f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--nproc_per_node=1", conf]
    text = "if attempt == '2': sys.exit(0)\n" + WAIT
    job = script(tmp_path, PLACE + text)
    with started(*where, job, FOLDER=str(tmp_path)) as main:
        wait_for(started_ranks(tmp_path, 0, 1), main)
        with started(*where, job, FOLDER=str(tmp_path)) as guest:
            wait_for(started_ranks(tmp_path, 1, 2), main)
            guest.send_signal(signal.SIGTERM)
            guest.communicate(timeout=LIMIT)
            assert guest.returncode == 143
        _, err = main.communicate(timeout=LIMIT)
    assert main.returncode == 0, err
    assert "has joined" in err and "leaves" in err
    assert started_ranks(tmp_path, 2, 1)[0].exists()


@pytest.mark.slow
@pytest.mark.skipif(not may_make_namespaces(), reason="may not make network namespaces")
def test_a_cut_cable_between_two_hosts(tmp_path: Path) -> None:
    """A cut that heals is not noticed; one that stays ends both hosts, and each blames the other."""
    text = ALL_REDUCE + WAIT
    job = script(tmp_path, PLACE + text)
    with two_hosts() as cable, ExitStack() as stack:
        launches = []
        for host in range(2):
            words = command("--nnodes=2", f"--node_rank={host}", f"--master_addr={cable.addresses[0]}",
                            "--rdzv_conf=keep_alive_interval=3,keep_alive_max_attempt=2", job)  # fmt: skip
            launch = subprocess.Popen(
                cable.command(host, *words),
                env=environment(FOLDER=str(tmp_path)),
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            stack.callback(_clean, launch)
            launches.append(launch)
        wait_for(started_ranks(tmp_path, 0, 2), launches[0])
        assert launches[0].stdout is not None
        assert launches[0].stdout.readline() == "[rank0]: sum 3.0 cable\n"
        cable.set("down")
        time.sleep(3)
        cable.set("up")
        time.sleep(6)
        assert [launch.poll() for launch in launches] == [None, None]
        cable.set("down")
        results = ends(launches)
    assert [status for status, _, _ in results] == [1, 1]
    assert "nothing was heard of it for " in results[0][2]
    assert f"lost a host: the main host {cable.addresses[0]}: nothing was heard of it" in results[1][2]
    assert still_alive(pids_in(tmp_path), within=0) == []


def _clean(launch: subprocess.Popen[str]) -> None:
    if launch.poll() is None:
        for pid in [*descendants(launch.pid), launch.pid]:
            kill(pid)
        launch.communicate(timeout=LIMIT)


def test_the_main_host_is_told_by_its_address() -> None:
    assert is_ours("127.0.0.1") and is_ours("localhost") and not is_ours("192.0.2.1")
    assert not is_ours("no-such-host.invalid")
    if os.path.exists("/sys/class/net/lo"):
        assert interface_of("127.0.0.1") == "lo" and interface_of("192.0.2.1") is None
