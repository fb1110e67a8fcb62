"""The shm process group: right results, whoever uses it, and memory that comes and goes."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm import native
from paceline.engine.ddp import DistributedDataParallel
from tests.comm.random_collectives import compare
from tests.ranks import run_ranks

HARNESS = Path(__file__).parents[1] / "csrc"
CPU = torch.device("cpu")


def test_the_kernel_was_built():
    assert native.why_unavailable() is None


@pytest.mark.parametrize("checker", ["plain", "address", "thread"])
def test_the_kernel_with_threads_as_ranks(checker, tmp_path):
    if shutil.which("make") is None or shutil.which("cc") is None:
        pytest.skip("no C compiler")
    command = ["make", "-s", "-C", str(HARNESS), checker, f"BUILD={tmp_path}", "COUNT=150"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("fine") == 5


def test_the_kernel_alone_can_be_timed(tmp_path):
    if shutil.which("make") is None or shutil.which("cc") is None:
        pytest.skip("no C compiler")
    what = [f"BUILD={tmp_path}", "TIMED_RANKS=1 3", "TIMED_BYTES=4 40000", "ROUNDS=2"]
    command = ["make", "-s", "-C", str(HARNESS), "time", *what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    timed = [line.partition(", us:")[0] for line in done.stdout.splitlines()]
    assert timed == ["1 ranks, 4 bytes", "1 ranks, 40000 bytes", "3 ranks, 4 bytes", "3 ranks, 40000 bytes"]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_random_collectives(world_size):
    run_ranks(compare, world_size, 80, world_size, timeout=100, backend="gloo", group_timeout=60)


def collectives_of_gloo(rank: int, world_size: int) -> None:
    ones = torch.ones(3)
    parts = [ones * r for r in range(world_size)]
    scattered = torch.empty(3)
    dist.scatter(scattered, parts if rank == 1 else None, src=1)
    assert torch.equal(scattered, ones * rank)
    gathered = [torch.empty(3) for _ in range(world_size)]
    dist.gather(scattered, gathered if rank == 0 else None, dst=0)
    assert rank or all(torch.equal(one, want) for one, want in zip(gathered, parts, strict=True))
    received = [torch.empty(3) for _ in range(world_size)]
    dist.all_to_all(received, [ones * (10 * rank + r) for r in range(world_size)])
    assert [one[0].item() for one in received] == [10 * r + rank for r in range(world_size)]
    if rank == 0:
        dist.send(ones * 7, 1)
    elif rank == 1:
        dist.recv(ones, 0)
        assert ones[0] == 7
    objects = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(world_size)]
    swapped = torch.empty(2)
    peer = rank ^ 1
    ops = [dist.P2POp(dist.isend, torch.ones(2) * rank, peer), dist.P2POp(dist.irecv, swapped, peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert swapped[0] == peer


def test_what_the_kernel_does_not_do_goes_through_gloo():
    run_ranks(collectives_of_gloo, 2, backend="shm")


def subgroups(rank: int, world_size: int) -> list[float]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 2, 3])]
    results = []
    for group, members in zip(groups, ([0, 2], [1, 2, 3]), strict=True):
        if rank in members:
            value = torch.full((5000,), float(rank))
            dist.all_reduce(value, group=group)
            dist.broadcast(source := value + rank, src=members[-1], group=group)
            results += [value[0].item(), source[-1].item()]
    return results


def test_subgroups():
    assert run_ranks(subgroups, 4, backend="shm") == [[2, 4], [6, 9], [2, 4, 6, 9], [6, 9]]


def split(rank: int, world_size: int) -> list[float]:
    results = []
    for parts in ([[0, 3], [1, 2]], [[1, 3]]):
        mine = next((part for part in parts if rank in part), parts[0])
        group = dist.group.WORLD.split_group(mine)
        assert (group is None) == (rank not in mine)
        if group is not None:
            value = torch.full((5000,), float(rank))
            group.allreduce([value]).wait()
            results.append(value[-1].item())
    return results


def test_split_groups():
    assert run_ranks(split, 4, backend="shm") == [[3.0], [3.0, 4.0], [3.0], [3.0, 4.0]]


def coalesced(rank: int, world_size: int) -> list[float]:
    tensors = [torch.full((n,), float(rank + 1)) for n in (3, 5000, 70_000)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    dropped = torch.ones(100_000)
    dist.all_reduce(dropped, async_op=True)  # nobody waits for it
    dist.barrier()
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
        assert work.is_completed() and work.is_success()
    return [tensor[-1].item() for tensor in tensors] + [dropped[0].item()]


def test_many_in_flight():
    assert run_ranks(coalesced, 3, backend="shm") == [[18.0, 18.0, 18.0, 3.0]] * 3


def a_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 4))


def trained(net: nn.Module, batch: Tensor, steps: int = 3) -> list[Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        net(batch).pow(2).mean().backward()
        optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in net.parameters()]


def train_like_one_process(rank: int, world_size: int, wrapping: str) -> list[bytes]:
    batch = torch.randn(8 * world_size, 64, generator=torch.Generator().manual_seed(1))
    wanted = trained(a_net(), batch)
    mine = batch[8 * rank : 8 * rank + 8]
    found = trained(WRAPPINGS[wrapping](a_net()), mine)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    return [one.detach().numpy().tobytes() for one in found]


def fully_sharded(net: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(net)


def fully_sharded_in_shared_memory(net: nn.Module) -> nn.Module:
    fully_sharded(net)
    for module in net.modules():
        if hasattr(module, "set_allocate_memory_from_process_group_for_comm"):
            module.set_allocate_memory_from_process_group_for_comm(True)
    return net


def with_futures(net: nn.Module) -> nn.Module:
    def hook(state, bucket):
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda f: f.value()[0].div_(dist.get_world_size()))

    wrapped = nn.parallel.DistributedDataParallel(net)
    wrapped.register_comm_hook(None, hook)
    return wrapped


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ours": DistributedDataParallel,
    "torch": nn.parallel.DistributedDataParallel,
    "torch with a hook": with_futures,
    "fsdp2": fully_sharded,
    "fsdp2 in the group's memory": fully_sharded_in_shared_memory,
}


@pytest.mark.parametrize("wrapping", list(WRAPPINGS))
def test_training_equals_one_process(wrapping):
    replicas = run_ranks(train_like_one_process, 2, wrapping, backend="shm")
    assert replicas[0] == replicas[1]


def buckets_in_place(rank: int, world_size: int) -> bool:
    wrapped = DistributedDataParallel(a_net())
    wrapped(torch.ones(8, 64)).sum().backward()
    arenas = [group._memory.arena for group in dist.distributed_c10d._world.pg_map]
    grads = [p.grad for p in wrapped.parameters()]
    return any(all(arena.holds(grad.data_ptr(), grad.nbytes) for grad in grads) for arena in arenas)


def test_gradients_lie_where_other_ranks_reach_them():
    assert run_ranks(buckets_in_place, 2, backend="shm") == [True, True]


def shared_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssShmem"):
            return int(line.split()[1]) * 1024
    return 0


def allocating(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    begin = shared_bytes()
    for _ in range(3):
        tensor = group.allocate_tensor(16 << 20, dtype=torch.float32, device=CPU)
        assert tensor.count_nonzero() == 0
        tensor += rank
        view = tensor[5:]
        del tensor
        gc.collect()
        assert view[0] == rank and shared_bytes() - begin > 50 << 20
        del view
        gc.collect()
        assert shared_bytes() - begin < 10 << 20  # given back with the last view
    kept = group.allocate_tensor(1000, dtype=torch.int64, device=CPU)
    dist.destroy_process_group()
    del group
    gc.collect()
    kept += 1  # outlives its group
    assert kept.sum() == 1000


def test_memory_goes_back_with_the_last_tensor():
    run_ranks(allocating, 2, backend="shm")


def distances_of_arenas(rank: int, world_size: int) -> list[int]:
    files = dist.group.WORLD._memory.neighbours.files
    return [files[a].address - files[b].address for a in files for b in files if a < b]


def test_arenas_do_not_lie_at_addresses_that_a_cache_takes_for_the_same():
    for distances in run_ranks(distances_of_arenas, 4, backend="shm"):
        assert distances
        assert all(distance % 2**20 for distance in distances)


def data_loader_workers(rank: int, world_size: int, method: str) -> list[float]:
    shared = dist.group.WORLD.allocate_tensor(1 << 20, dtype=torch.float32, device=CPU)
    dist.all_reduce(shared)
    loader = torch.utils.data.DataLoader(
        torch.arange(8.0), batch_size=2, num_workers=2, multiprocessing_context=method
    )
    seen = []
    for batch in loader:
        dist.all_reduce(batch)
        seen += batch.tolist()
    return seen


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers(method):
    expected = [2.0 * i for i in range(8)]
    assert run_ranks(data_loader_workers, 2, method, backend="shm", timeout=100) == [expected] * 2


def descriptors_after_fork(rank: int, world_size: int) -> tuple[int, int]:
    shared = dist.group.WORLD.allocate_tensor(1 << 20, dtype=torch.float32, device=CPU)
    del shared
    reader, writer = os.pipe()
    if os.fork() == 0:
        maps = Path("/proc/self/maps").read_text().count("memfd:paceline")
        files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)]
        os.write(writer, f"{maps} {sum('memfd:paceline' in name for name in files)}".encode())
        os._exit(0)
    os.wait()
    maps, files = os.read(reader, 100).split()
    return int(maps), int(files)


def _is_link(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def test_forked_children_inherit_neither_memory_nor_files():
    assert run_ranks(descriptors_after_fork, 2, backend="shm") == [(0, 0)] * 2


def scattered_on_hosts(rank: int, world_size: int) -> None:
    """Part p of rank r's input is r + p everywhere."""
    ranks = torch.arange(world_size, dtype=torch.float64)
    wanted = {dist.ReduceOp.SUM: ranks.sum() + world_size * rank, dist.ReduceOp.MAX: ranks.max() + rank}
    wanted |= {dist.ReduceOp.AVG: ranks.mean() + rank, dist.ReduceOp.PRODUCT: (ranks + rank).prod()}
    for numel in (1, 7, 5000, 100_001):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for op, want in wanted.items():
                source = (rank + ranks).to(dtype).repeat_interleave(numel)
                before, part = source.clone(), torch.empty(numel, 2, dtype=dtype)[:, 0]
                if numel == 7:
                    dist.reduce_scatter(part, list(source.chunk(world_size)), op)
                else:
                    dist.reduce_scatter_single(part, source, op)
                assert torch.equal(part, want.to(dtype).expand(numel)), (numel, dtype, op)
                assert torch.equal(source, before)


def on_hosts(rank: int, world_size: int, host_of_rank: list[int]) -> tuple[list[float], ...]:
    from paceline.comm import hosts

    real = hosts._identity
    hosts._identity = lambda number: f"{real(number)} host {host_of_rank[number]}"
    dist.init_process_group("shm")
    results = []
    for numel in (1, 5000, 300_001):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
                value = torch.full((numel, 2), 3 * rank + 1, dtype=dtype)[:, :1]
                work = dist.all_reduce(value, op, async_op=True)
                work.get_future().wait() if numel == 1 else work.wait()
                assert (value == value[0]).all()
                results.append(value[0].item())
    gathered = [torch.empty(5000) for _ in range(world_size)]
    dist.all_gather(gathered, torch.full((5000,), float(rank)))
    stacked, part = torch.empty(world_size, 10), torch.empty(10)  # shapes that Gloo itself refuses
    dist.all_gather_single(stacked, torch.full((10,), float(rank)))
    dist.reduce_scatter_single(part, stacked)
    assert torch.equal(part, torch.full((10,), float(rank * world_size)))
    scattered_on_hosts(rank, world_size)
    dist.barrier()
    found = trained(DistributedDataParallel(a_net()), torch.full((8, 64), rank + 1.0))
    return results, [one[0].item() for one in gathered], [one.numpy().tobytes() for one in found]


@pytest.mark.parametrize("host_of_rank", [[0, 0, 1, 1], [0, 1, 1, 0, 1], [0, 1]])
def test_several_hosts(host_of_rank):
    size = len(host_of_rank)
    total, most = sum(3 * rank + 1 for rank in range(size)), 3 * size - 2
    outcomes = run_ranks(on_hosts, size, host_of_rank, backend=None, timeout=90)
    for results, gathered, trained_bytes in outcomes:
        for start in range(0, 27, 3):
            whole = (start // 3) % 3 == 2
            assert results[start] == total and results[start + 2] == most
            assert results[start + 1] == (total // size if whole else total / size)
        assert gathered == [float(rank) for rank in range(size)]
        assert trained_bytes == outcomes[0][2]


def one_cannot_join(rank: int, world_size: int) -> tuple[bool, float]:
    if rank == 1:
        from paceline.comm import hosts

        def refuse(*_: Any) -> None:
            raise OSError("no anonymous files here")

        hosts.Arena = refuse
    dist.init_process_group("shm")
    value = torch.full((5000,), float(rank))
    dist.all_reduce(value)
    return dist.group.WORLD.supports_tensor_alloc(CPU), value[0].item()


def test_one_that_cannot_join_sends_all_to_gloo():
    assert run_ranks(one_cannot_join, 3, backend=None) == [(False, 3.0)] * 3


def uneven_under_torchs_join(rank: int, world_size: int) -> list[float]:
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(5, 5, bias=False))
    seen = []
    with wrapped.join(divide_by_initial_world_size=False):
        for _ in range(2 + 2 * rank):
            wrapped(torch.full((1, 5), rank + 1.0)).sum().backward()
            seen.append(wrapped.module.weight.grad[0, 0].item())
            wrapped.zero_grad()
    return seen


def test_works_that_only_cpp_keeps_can_be_waited_for():
    assert run_ranks(uneven_under_torchs_join, 2, backend="shm") == [[1.5, 1.5], [1.5, 1.5, 2.0, 2.0]]


def compiled(rank: int, world_size: int) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))  # its buffers are broadcast in forward
    wrapped = torch.compile(nn.parallel.DistributedDataParallel(net), backend="eager")
    for _ in range(2):
        wrapped(torch.full((3, 4), float(rank))).sum().backward()
    return net[1].running_mean.tolist()


def test_compiled_modules_may_call_collectives():
    run_ranks(compiled, 2, backend="shm", timeout=100)
