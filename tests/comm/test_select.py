"""Which backend serves, and how a group comes up."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.comm import native
from paceline.comm.select import (
    available_backends,
    choose_backend,
    choose_device,
    default_store,
    initialize_process_group,
)
from paceline.errors import ArgumentError, BackendUnavailableError
from tests.ranks import rank_outcomes, run_ranks

CPU = torch.device("cpu")


def test_shared_memory_is_the_usual_one_on_the_cpu() -> None:
    choice = choose_backend(None, CPU)
    assert choice.name == "shm"
    assert choice.reason == "shm serves, because it is the usual one for cpu"
    assert available_backends(CPU)[:2] == ("shm", "gloo")


def test_gloo_is_the_usual_one_where_the_kernel_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "missing.so")
    monkeypatch.setattr(native, "load", native.load.__wrapped__)
    assert choose_backend(None, CPU).name == "gloo"
    with pytest.raises(BackendUnavailableError, match=r"'shm' cannot serve .*was not built"):
        choose_backend("shm", CPU)


@pytest.mark.parametrize("name", ["nccl", "mpi", "hccl", "cncl", "xccl", "carrier pigeon"])
def test_what_cannot_serve_names_what_can(name: str) -> None:
    with pytest.raises(BackendUnavailableError, match=f"'{name}' cannot serve .*available: shm, gloo"):
        choose_backend(name, CPU)


def test_an_accelerators_backend_is_joined_with_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert choose_backend(None, torch.device("cuda", 0)).name == "cpu:gloo,cuda:nccl"
    assert choose_backend("gloo", torch.device("cuda", 0)).name == "gloo"


def test_the_launchers_cpu_flag_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert choose_device() == CPU
    assert choose_device(use_cpu=True) == CPU


def test_one_rank_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    initialize_process_group("gloo", device=CPU)
    value = torch.ones(3)
    dist.all_reduce(value)
    assert (dist.get_rank(), dist.get_world_size(), value.sum().item()) == (0, 1, 3.0)
    assert default_store() is not None


def test_a_group_that_is_up_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert "up already" in initialize_process_group(device=CPU).reason
    initialize_process_group("gloo", device=CPU)
    assert dist.group.WORLD is group
    with pytest.raises(ArgumentError, match=r"'nccl', but a process group with .*gloo"):
        initialize_process_group("nccl", device=CPU)


def wait_for_a_late_rank(rank: int, world_size: int) -> str:
    initialize_process_group(timeout=timedelta(seconds=1), device=CPU)
    dist.barrier()
    if rank == 1:
        time.sleep(6)
        return "late"
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        return "bounded"
    return "waited"


def test_the_timeout_bounds_collectives() -> None:
    assert run_ranks(wait_for_a_late_rank, 2, backend=None) == ["bounded", "late"]


def lose_the_store(rank: int, world_size: int, folder: Path) -> None:
    """Rank 0 holds the store and dies once rank 1 is connected to it."""
    if rank == 0:
        port = int(os.environ["MASTER_PORT"])
        held = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, use_libuv=True)
        while held.port and not (folder / "connected").exists():
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=20)).set("here", "1")
    (folder / "connected").touch()
    initialize_process_group(timeout=timedelta(seconds=20), device=CPU)


def test_a_store_that_is_lost_while_the_group_is_made_is_a_lost_peer(tmp_path: Path) -> None:
    _, second = rank_outcomes(lose_the_store, 2, tmp_path, backend=None)
    assert "PeerLostError: rank 1 could not make the process group" in str(second.error)
    assert "Rank 0 holds it" in str(second.error)
