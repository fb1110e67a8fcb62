"""The shm process group when ranks die, stop, disagree or run out of memory: nobody waits for ever."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    PeerLostError,
    RanksOutOfStepError,
)
from tests.ranks import rank_outcomes, run_ranks

CPU = torch.device("cpu")


def failure_of(call: Callable[[], Any]) -> tuple[str, str, float]:
    """The exception's class and text, and after how many seconds it came."""
    began = time.monotonic()
    try:
        call()
    except CommunicationError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def peer_killed(rank: int, world_size: int, numel: int, in_flight: bool) -> tuple[str, str, float]:
    value = torch.ones(numel)
    dist.all_reduce(value)
    if rank == world_size - 1:
        if os.fork() == 0:  # a worker that lives on must not look like its parent
            time.sleep(5)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    if in_flight:
        return failure_of(lambda: [dist.all_reduce(value, async_op=True) for _ in range(3)][-1].wait())
    return failure_of(lambda: dist.all_reduce(value))


@pytest.mark.parametrize("numel", [10, 1_000_000])
@pytest.mark.parametrize("in_flight", [False, True])
def test_a_killed_rank_is_named_at_once(numel, in_flight):
    for outcome in rank_outcomes(peer_killed, 3, numel, in_flight, backend="shm", timeout=40)[:-1]:
        name, text, seconds = outcome.value
        assert name == PeerLostError.__name__, outcome
        assert "the process of rank 2 is gone" in text and f"all_reduce SUM of {numel:,} x float32" in text
        assert seconds < 5


def peer_stopped(rank: int, world_size: int) -> tuple[str, str, float]:
    value = torch.ones(10)
    dist.all_reduce(value)
    if rank == 1:
        me = os.getpid()
        if os.fork() == 0:
            time.sleep(5)
            os.kill(me, signal.SIGCONT)
            os._exit(0)
        os.kill(me, signal.SIGSTOP)
    failure = failure_of(lambda: dist.broadcast(value, 0))
    assert failure_of(lambda: dist.barrier())[0]  # a group that failed stays failed
    time.sleep(0 if rank == 1 else 4)  # the stopped one must wake up to a peer
    return failure


def test_a_stopped_rank_is_named_at_the_timeout():
    waited, stopped = run_ranks(peer_stopped, 2, backend="shm", group_timeout=2, timeout=40)
    assert waited[0] == stopped[0] == CollectiveTimeoutError.__name__
    assert "rank 1 did not come before the timeout of 2 s" in waited[1]
    assert "collective 2 (broadcast of 10 x float32 from rank 0)" in waited[1]
    assert waited[2] > 1.9
    assert "this rank came too late" in stopped[1]


def different_calls(rank: int, world_size: int) -> list[tuple[str, str, float]]:
    value = torch.ones(100_000)
    odd = rank == world_size - 1
    parts = [torch.ones(100_000) for _ in range(world_size)]
    mixed = [value.double() for _ in parts] if odd else [value for _ in parts]
    calls = [
        lambda: dist.all_reduce(value[:10] if odd else value),
        lambda: dist.all_reduce(value.double() if odd else value),
        lambda: dist.all_reduce(value, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
        lambda: dist.broadcast(value, world_size - 1 if odd else 0),
        lambda: dist.barrier() if odd else dist.all_reduce(value),
        lambda: dist.gather(value, parts, world_size - 1) if odd else dist.all_reduce(value),
        lambda: dist.gather(value) if odd else dist.scatter(value, None if rank else parts),
        lambda: dist.all_to_all([torch.empty_like(one) for one in mixed], mixed),
    ]
    failures = [failure_of(call) for call in calls]
    assert all(torch.equal(one, torch.ones(100_000)) for one in (value, *parts))  # nothing was moved
    dist.all_reduce(value)  # and the ranks go on
    assert value[0] == world_size
    return failures


@pytest.mark.parametrize("world_size", [2, 4])
def test_different_calls_raise_on_all_ranks(world_size):
    for failures in run_ranks(different_calls, world_size, backend="shm"):
        assert {name for name, _, _ in failures} == {RanksOutOfStepError.__name__}
        texts = [text for _, text, _ in failures]
        odd = world_size - 1
        assert f"rank {odd} called all_reduce SUM of 10 x float32" in texts[0]
        assert f"rank {odd} called all_reduce SUM of 100,000 x float64" in texts[1]
        assert f"rank {odd} called all_reduce MAX" in texts[2]
        assert f"rank {odd} called broadcast of 100,000 x float32 from rank {odd}" in texts[3]
        assert f"rank {odd} called barrier" in texts[4]
        assert f"rank {odd} called gather of 100,000 x float32 to rank {odd}" in texts[5]
        assert f"rank {odd} called gather of 100,000 x float32 to rank 0" in texts[6]
        assert "called scatter of 100,000 x float32 from rank 0" in texts[6]
        assert f"rank {odd} called all_to_all of float64" in texts[7]
        assert all("called all_reduce SUM of 100,000 x float32" in texts[i] for i in (0, 1, 2, 4))


def different_calls_on_hosts(rank: int, world_size: int) -> list[tuple[str, str, float]]:
    from paceline.comm import hosts

    real = hosts._identity
    hosts._identity = lambda number: f"{real(number)} host {number // 2}"
    dist.init_process_group("shm")
    value, odd, gathered = torch.ones(5000), rank == 3, [torch.empty(5000) for _ in range(world_size)]
    other_host = rank >= 2
    calls = [
        lambda: dist.all_reduce(value[:10] if other_host else value),
        lambda: dist.all_reduce(value, dist.ReduceOp.MAX if other_host else dist.ReduceOp.SUM),
        lambda: dist.all_reduce(value.double() if odd else value),
        lambda: dist.broadcast(value, 1 if other_host else 0),
        lambda: dist.barrier() if other_host else dist.all_gather(gathered, value),
        lambda: dist.reduce_scatter(value, gathered, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
    ]
    failures = [failure_of(call) for call in calls]
    assert torch.equal(value, torch.ones(5000))  # nothing was moved
    works = [dist.all_reduce(value, async_op=True), dist.all_gather(gathered, value * 2, async_op=True)]
    dist.barrier()  # and the ranks go on, in the order of calls
    for work in works:
        work.wait()
    assert value[0] == world_size
    return failures


def test_different_calls_raise_over_hosts_too():
    for rank, failures in enumerate(run_ranks(different_calls_on_hosts, 4, backend=None)):
        assert {name for name, _, _ in failures} == {RanksOutOfStepError.__name__}
        texts = [text for _, text, _ in failures]
        assert (
            "ranks 0, 1 called all_reduce of 5,000 x float32; ranks 2, 3 called all_reduce of 10 x"
            in texts[0]
        )
        assert "ranks 2, 3 called all_reduce MAX of 5,000 x float32" in texts[1]
        told = "ranks 2, 3 differ themselves" if rank < 2 else "rank 3 called all_reduce of 5,000 x float64"
        assert told in texts[2]
        assert "ranks 2, 3 called broadcast of 5,000 x float32 from rank 1" in texts[3]
        assert "ranks 0, 1 called all_gather of float32; ranks 2, 3 called barrier" in texts[4]


def lost_on_another_host(rank: int, world_size: int, lost: int, how: int, timeout_s: float) -> Any:
    """Ranks 0, 1 and 2, 3 are hosts; one of them is lost while the others wait for it, twice."""
    from paceline.comm import hosts

    real = hosts._identity
    hosts._identity = lambda number: f"{real(number)} host {number // 2}"
    dist.init_process_group("shm", timeout=timedelta(seconds=timeout_s))
    value = torch.ones(1000)
    dist.all_reduce(value)
    if rank == lost:
        time.sleep(0.3)  # the others wait by then
        os.kill(os.getpid(), how)
    failures = [failure_of(lambda: dist.all_reduce(value)), failure_of(dist.barrier)]
    time.sleep(timeout_s / 2 if timeout_s < 10 else 2)  # nobody learns of it because this process ends
    return failures


@pytest.mark.parametrize(
    (
        "lost",
        "how",
        "timeout_s",
    ),  # rank 2 is the second host's connection to the first one, rank 3 its neighbour
    [(2, signal.SIGKILL, 60), (3, signal.SIGKILL, 60), (2, signal.SIGSTOP, 4)],
)
def test_ranks_of_all_hosts_are_told_who_was_lost(lost, how, timeout_s):
    args = (lost, how, timeout_s)
    outcomes = rank_outcomes(lost_on_another_host, 4, *args, backend=None, timeout=15)
    said = (
        f"the process of rank {lost} is gone" if how == signal.SIGKILL else f"rank {lost} did not come before"
    )
    wanted = PeerLostError if how == signal.SIGKILL else CollectiveTimeoutError
    for outcome in outcomes:
        if outcome.rank != lost:
            (name, text, seconds), (later, again, at_once) = outcome.value
            assert name == later == wanted.__name__ and said in text and said in again, outcome
            assert seconds < (5 if how == signal.SIGKILL else timeout_s + 3) and at_once < 3


def test_hosts_do_not_wait_for_a_store_that_was_stopped():
    args = (0, signal.SIGSTOP, 4)  # rank 0 holds the store
    for outcome in rank_outcomes(lost_on_another_host, 4, *args, backend=None, timeout=20)[1:]:
        (name, _, seconds), (later, _, at_once) = outcome.value
        assert name in (PeerLostError.__name__, CollectiveTimeoutError.__name__) and later == name, outcome
        assert seconds < 10 and at_once < 3


def used_in_a_fork(rank: int, world_size: int) -> tuple[str, float]:
    value = torch.ones(10)
    reader, writer = os.pipe()
    if os.fork() == 0:
        name, text, _ = failure_of(lambda: dist.all_reduce(value))
        os.write(writer, f"{name} {text}".encode())
        os._exit(0)
    os.wait()
    dist.all_reduce(value)
    return os.read(reader, 1000).decode(), value[0].item()


def test_a_forked_child_is_told():
    for said, value in run_ranks(used_in_a_fork, 2, backend="shm"):
        assert said.startswith("CommunicationError a forked process cannot use its parent's process group")
        assert value == 2


def destroyed_in_a_fork(rank: int, world_size: int) -> tuple[int, float]:
    value = torch.ones(10)
    dist.all_reduce(value)
    if (child := os.fork()) == 0:
        own = [
            os.open(os.devnull, os.O_RDONLY) for _ in range(50)
        ]  # numbers that stood for the parent's sockets
        dist.group.WORLD.shutdown()
        closed = [descriptor for descriptor in own if not Path(f"/proc/self/fd/{descriptor}").exists()]
        os._exit(len(closed))
    _, status = os.waitpid(child, 0)
    dist.all_reduce(value)
    return os.waitstatus_to_exitcode(status), value[0].item()


def test_a_forked_child_that_leaves_closes_nothing_but_its_own():
    assert run_ranks(destroyed_in_a_fork, 2, backend="shm") == [(0, 4.0)] * 2


def too_large(rank: int, world_size: int) -> str:
    group = dist.group.WORLD
    with pytest.raises(MemoryError) as caught:
        group.allocate_tensor(1 << 45, dtype=torch.float32, device=CPU)
    value = group.allocate_tensor(1000, dtype=torch.float32, device=CPU)
    dist.all_reduce(value + 1)
    return str(caught.value)


def test_too_large_a_tensor_is_an_exception():
    assert all("used up" in text for text in run_ranks(too_large, 2, backend="shm"))


LIMITED = """
import os, sys
folder = sys.argv[1]
open(f"{folder}/{sys.argv[2]}", "w").write(str(os.getpid()))
import torch, torch.distributed as dist
dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)
group, held = dist.group.WORLD, []
try:
    for _ in range(100):
        held.append(group.allocate_tensor(8 << 20, dtype=torch.float32, device=torch.device("cpu")))
except MemoryError as error:
    print(f"{len(held)} tensors; MemoryError: {error}")
"""


def test_a_memory_cgroup_answers_with_an_exception(tmp_path):
    version_1 = Path("/sys/fs/cgroup/memory")
    parent = version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")
    limit, members = (
        ("memory.limit_in_bytes", "cgroup.procs") if version_1.is_dir() else ("memory.max", "cgroup.procs")
    )
    folder = parent / f"paceline-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(1 << 30))
    except OSError:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip("no memory cgroup can be made here")
    try:
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, str(folder), members],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        for _ in range(50):
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.1)
    assert done.returncode == 0, done
    assert "MemoryError" in done.stdout and "the memory cgroup has" in done.stdout


SMALL = """
import sys
import torch, torch.distributed as dist
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("shm", init_method=f"file://{path}", rank=rank, world_size=2)
value = dist.group.WORLD.allocate_tensor(4 << 20, dtype=torch.float32, device=torch.device("cpu"))
value += rank + 1
dist.all_reduce(value)
print(value[-1].item())
"""


def test_dev_shm_does_not_matter(tmp_path):
    mount = 'mount -t tmpfs -o size=256k tmpfs /dev/shm && exec "$@"'
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    before = set(os.listdir("/dev/shm"))
    ranks = [
        subprocess.Popen(
            [
                "unshare",
                "-m",
                "sh",
                "-c",
                mount,
                "sh",
                sys.executable,
                "-c",
                SMALL,
                str(rank),
                str(tmp_path / "meet"),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert [rank.communicate(timeout=60)[0].strip() for rank in ranks] == ["3.0", "3.0"]
    finally:
        for rank in ranks:
            rank.kill()
    assert {name for name in os.listdir("/dev/shm") if "pace" in name} <= before


LEAVING = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)

def still_at_it(future):
    for _ in range(100):
        time.sleep(0.005)

work = dist.gather(torch.ones(4), [torch.empty(4)], async_op=True)
work.get_future().then(still_at_it)
work.wait()
if sys.argv[1] == "destroys":
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["destroys", "exits"])
def test_the_thread_behind_a_callback_does_not_outlive_the_interpreter(how):
    done = subprocess.run(
        [sys.executable, "-c", LEAVING, how], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def closed_while_waited_for(rank: int, world_size: int) -> list[tuple[str, str, float]]:
    group, value = dist.new_group(backend="shm"), torch.ones(100_000)
    dist.barrier()
    found = []
    if rank == 0:  # the others never come
        works = [dist.all_reduce(value, group=group, async_op=True) for _ in range(2)]
        waiter = threading.Thread(target=lambda: found.append(failure_of(works[1].wait)))
        waiter.start()
        time.sleep(0.2)
        group.shutdown()
        waiter.join()
        found.append(failure_of(works[0].wait))
        found.append(failure_of(lambda: dist.all_reduce(value, group=group)))
        found.append(failure_of(lambda: dist.gather(value, [value] * world_size, group=group)))
    dist.barrier()
    return found


def test_a_group_may_be_left_while_another_thread_waits():
    found = run_ranks(closed_while_waited_for, 2, backend="shm", timeout=40)[0]
    assert [name for name, _, _ in found] == ["CommunicationError"] * 4
    assert all("was shut down" in text and seconds < 5 for _, text, seconds in found)


def interrupted(rank: int, world_size: int) -> None:
    """Rank 0 is interrupted while it waits, and lets go of the tensor before rank 1 comes."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if rank == 0:
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        value = torch.ones(300_000)
        in_use = weakref.ref(value)
        try:
            dist.all_reduce(value)
        except KeyboardInterrupt:
            del value
        gc.collect()
        assert in_use() is not None
    else:
        time.sleep(1.5)
        dist.all_reduce(torch.ones(300_000))
    last = torch.ones(1)
    dist.all_reduce(last)
    assert last == world_size


def test_an_interrupted_collective_keeps_the_memory_it_works_on():
    run_ranks(interrupted, 2, backend="shm")
