"""Buffers follow rank 0 whatever their dtype, layout and strides; other forms are told or left alone."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from paceline.engine.ddp import DistributedDataParallel
from tests.engine.test_pass import CountedCollectives
from tests.ranks import run_ranks

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


class Holder(nn.Module):
    """A linear layer beside any buffers; forward runs ``change(self)`` first."""

    def __init__(self, change=lambda module: None, **buffers):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)
        self.change = change
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x):
        self.change(self)
        return self.layer(x)


def caught(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def step(wrapper):
    wrapper.zero_grad()
    wrapper(torch.ones(2, 3)).sum().backward()


def bytes_of(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def of_all_dtypes(rank):
    values = torch.arange(1, 6) + 3 * rank
    return {str(dtype).replace("torch.", "of_"): values.to(dtype) for dtype in DTYPES}


def every_dtype(rank, world):
    strides = {"turned": torch.arange(6.0).view(2, 3).t() + rank, "scalar": torch.tensor(3.0 + rank)}
    nothing = {"empty": torch.empty(0, 3), "none": None}
    wrapper = DistributedDataParallel(Holder(**of_all_dtypes(rank), **strides, **nothing))
    built = {name: bytes_of(b) for name, b in wrapper.module.named_buffers()}
    step(wrapper)
    for buffer in wrapper.module.buffers():
        buffer.view(torch.uint8).fill_(rank) if buffer.dim() == 1 else buffer.fill_(rank)
    step(wrapper)
    trained = {name: bytes_of(b) for name, b in wrapper.module.named_buffers()}
    return built, trained, wrapper.module.turned.stride()


@pytest.mark.parametrize("world", [2, 3])
def test_buffers_of_every_dtype_follow_rank_0_at_construction_and_in_training(world):
    wanted = {name: bytes_of(buffer) for name, buffer in of_all_dtypes(0).items()}
    wanted |= {"turned": bytes_of(torch.arange(6.0).view(2, 3).t()), "scalar": bytes_of(torch.tensor(3.0))}
    wanted["empty"] = []
    for built, trained, stride in run_ranks(every_dtype, world, timeout=60):
        assert built == wanted
        assert set().union(*map(set, trained.values())) == {0}
        assert stride == (1, 3)


def sparse(layout, scale, count=3):
    dense = torch.diag(torch.tensor([1.0] * count + [0.0] * (4 - count))) * scale
    to_layout = {
        "coo": lambda: dense.to_sparse(),
        "csr": lambda: dense.to_sparse_csr(),
        "csc": lambda: dense.to_sparse_csc(),
        "bsr": lambda: dense.to_sparse_bsr((2, 2)),
    }
    return to_layout[layout]()


def sparse_and_overlapping(rank, world):
    buffers = {layout: sparse(layout, 1.0 + rank) for layout in ("coo", "csr", "csc", "bsr")}
    expanded = torch.tensor([1.0 + rank]).expand(4)
    same = torch.tensor([5.0]).expand(4)
    net = Holder(**buffers, expanded=expanded, same=same)
    net.wide = nn.Parameter(torch.tensor([2.0 + rank]).expand(3))
    wrapper = DistributedDataParallel(net, find_unused_parameters=True)
    for _ in range(2):
        step(wrapper)
    values = {name: buffer.to_dense().tolist() for name, buffer in net.named_buffers()}
    layouts = [str(net.get_buffer(name).layout) for name in buffers]
    uneven = Holder(table=sparse("coo", 1.0, 2 + rank))
    return (
        values,
        layouts,
        net.same.data_ptr() == same.data_ptr(),
        net.wide.tolist(),
        caught(lambda: DistributedDataParallel(uneven)),
    )


def test_sparse_and_overlapping_buffers_follow_rank_0():
    for values, layouts, untouched, wide, uneven in run_ranks(sparse_and_overlapping, 2, timeout=60):
        diagonal = torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.0])).tolist()
        assert all(values[name] == diagonal for name in ("coo", "csr", "csc", "bsr"))
        assert layouts == [f"torch.sparse_{name}" for name in ("coo", "csr", "csc", "bsr")]
        assert values["expanded"] == [1.0] * 4 and values["same"] == [5.0] * 4
        assert untouched, "an equal buffer was replaced"
        assert wide == [2.0] * 3
        assert (
            "buffer table is shape [4, 4], torch.float32, torch.sparse_coo of 2 entries on rank 0" in uneven
        )


def forms_differ_at_construction(rank, world):
    kinds = {
        "shape": {"b": torch.ones(4 + rank)},
        "dtype": {"b": torch.ones(4, dtype=[torch.float32, torch.float64, torch.float64][rank])},
        "missing": {} if rank else {"b": torch.ones(4)},
        "name": {["b", "c", "b"][rank]: torch.ones(4)},
    }
    messages = {k: caught(lambda k=k: DistributedDataParallel(Holder(**kinds[k]))) for k in kinds}
    step(DistributedDataParallel(Holder(b=torch.ones(1))))  # the group is as it was
    return messages


def test_buffers_that_differ_in_form_raise_at_construction_on_every_rank():
    for found in run_ranks(forms_differ_at_construction, 3, timeout=60):
        assert all(
            text.startswith("ReplicaMismatchError: ") and "buffer b is " in text for text in found.values()
        )
        assert (
            "shape [4], torch.float32 on rank 0, shape [5], torch.float32 on rank 1, shape [6]"
            in found["shape"]
        )
        assert "torch.float32 on rank 0, shape [4], torch.float64 on ranks 1, 2" in found["dtype"]
        assert "torch.float32 on rank 0, nothing on ranks 1, 2" in found["missing"]
        assert "torch.float32 on ranks 0, 2, nothing on rank 1" in found["name"]


def growing(persistent, size):
    def change(module):
        wanted = size(module.calls)
        module.calls += 1
        if wanted > module.cache.numel():
            module.register_buffer("cache", torch.full((wanted,), 1.0), persistent=persistent)

    module = Holder(change)
    module.register_buffer("cache", torch.ones(4), persistent=persistent)
    module.register_buffer("scale", torch.tensor([5.0, 6.0]))  # behind it in every message
    module.calls = 0
    return module


def growing_caches(rank, world):
    found = {}
    for longest in range(world):
        net = growing(False, lambda call, longest=longest: 4 + (call + 1) * (1 + (rank == longest)))
        wrapper = DistributedDataParallel(net)
        for index in range(4):
            step(wrapper)
            net.scale.fill_(10.0 * rank + index)
        step(wrapper)
        found[longest] = net.cache.tolist(), net.scale.tolist()
    lazily = Holder(
        lambda module: module.register_buffer("mask", torch.ones(2), False) if rank == 0 else None
    )
    lazily.register_buffer("scale", torch.tensor([5.0 + rank]))
    wrapper = DistributedDataParallel(lazily)
    for _ in range(3):
        step(wrapper)
    return found, lazily.scale.tolist()


@pytest.mark.parametrize("world", [2, 3])
def test_caches_of_other_sizes_are_each_ranks_own_and_other_buffers_follow_rank_0(world):
    for rank, (found, lazily) in enumerate(run_ranks(growing_caches, world, timeout=60)):
        for longest, (cache, scale) in found.items():
            assert cache == [1.0] * (4 + 5 * (1 + (rank == longest)))
            assert scale == [3.0, 3.0]
        assert lazily == [5.0]


def growing_state(rank, world):
    found = []
    for longest in range(world):
        net = growing(True, lambda call, longest=longest: 4 + (call == 2 and rank == longest))
        wrapper = DistributedDataParallel(net)
        messages = [caught(lambda wrapper=wrapper: step(wrapper)) for _ in range(4)]
        found.append((messages, net.scale.tolist()))
        net.cache = torch.ones(9)  # all ranks alike again
        found[-1][0].append(caught(lambda wrapper=wrapper: step(wrapper)))
        found[-1][0].append(caught(lambda wrapper=wrapper: step(wrapper)))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_state_that_grows_on_one_rank_raises_on_all_before_values_are_mixed(world):
    for found in run_ranks(growing_state, world, timeout=60):
        for longest, (messages, scale) in enumerate(found):
            assert messages[:3] == ["fine"] * 3 and messages[4:] == ["fine"] * 2
            assert messages[3].startswith("ReplicaMismatchError: ")
            assert (
                "buffer cache is " in messages[3]
                and f"shape [5], torch.float32 on rank {longest}" in messages[3]
            )
            assert scale == [5.0, 6.0]


def changed_between_passes(rank, world):
    """A cache changes its size on one rank after backward, when no tail will say so before the broadcast."""
    found = {}
    for changing in range(world):
        net = growing(False, lambda call: 0)
        wrapper = DistributedDataParallel(net)
        step(wrapper)
        net.scale.fill_(7.0 + rank)
        if rank == changing:
            net.cache = torch.full((9,), 2.0)
        step(wrapper)
        step(wrapper)
        found[changing] = net.cache.tolist(), net.scale.tolist()
    return found


def test_a_form_that_changes_after_backward_does_not_shift_values():
    for rank, found in enumerate(run_ranks(changed_between_passes, 3, timeout=60)):
        for changing, (cache, scale) in found.items():
            assert cache == ([2.0] * 9 if rank == changing else [1.0] * 4)
            assert scale == [7.0, 7.0]


def collectives_of_a_step(rank, world):
    net = growing(False, lambda call: 4 + call)  # on all ranks alike
    wrapper = DistributedDataParallel(net)
    step(wrapper)
    step(wrapper)
    step(wrapper)
    with CountedCollectives() as counted:
        step(wrapper)
    return [name for name, _ in counted.calls]


def test_agreeing_on_forms_costs_no_collective():
    for calls in run_ranks(collectives_of_a_step, 2, timeout=60):
        assert calls == ["broadcast", "all_reduce", "broadcast"]


class Normalised(nn.Sequential):
    """Running statistics that differ with each rank's data, until they follow rank 0."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def evaluated(rank, world, wrap, alone):
    wrapper = wrap(Normalised())
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    for number in range(4):
        accumulates = number == 2
        with wrapper.no_sync() if accumulates else contextlib.nullcontext():
            torch.manual_seed(10 * rank + number)
            wrapper(rank + torch.randn(5, 3)).square().mean().backward()
        if not accumulates:
            optimizer.step()
            optimizer.zero_grad()
    wrapper.eval()
    with torch.no_grad():
        result = wrapper(torch.arange(6.0).view(2, 3)) if rank == 0 or not alone else None
    return result, {name: buffer.clone() for name, buffer in wrapper.module.named_buffers()}


@pytest.mark.parametrize("alone", [False, True])
def test_all_ranks_evaluate_and_save_the_model_of_rank_0_after_a_step(alone):
    torchs = run_ranks(evaluated, 2, nn.parallel.DistributedDataParallel, False, timeout=60)
    ours = run_ranks(evaluated, 2, DistributedDataParallel, alone, timeout=60)
    wanted, buffers = torchs[0]
    assert torch.equal(torchs[1][0], wanted)
    for rank, (result, now) in enumerate(ours):
        if rank == 0 or not alone:
            torch.testing.assert_close(result, wanted)
        torch.testing.assert_close(now, buffers)


def saved_by_a_graph(rank, world):
    net = Holder(factor=torch.tensor([2.0 + rank] * 2))
    wrapper = DistributedDataParallel(net)
    step(wrapper)
    net.factor = torch.tensor([2.0 + rank] * 2)
    saved = net.layer(torch.ones(2, 3)) * net.factor
    step(wrapper)
    net.zero_grad()
    with wrapper.no_sync():
        saved.sum().backward()
    return net.factor.tolist(), net.layer.bias.grad.tolist()


def test_a_buffer_that_a_graph_has_saved_is_replaced_and_not_written():
    for rank, (factor, gradient) in enumerate(run_ranks(saved_by_a_graph, 2, timeout=60)):
        assert factor == [2.0, 2.0]
        assert gradient == [2 * (2.0 + rank)] * 2


def on_meta(rank, world):
    with torch.device("meta"):
        nets = [Holder(), nn.Sequential(nn.ReLU(), nn.Linear(2, 2))]
    buffers_only = Holder()
    buffers_only.register_buffer("table", torch.ones(2, device="meta"))
    return [caught(lambda net=net: DistributedDataParallel(net)) for net in (*nets, buffers_only)]


def test_what_has_no_values_is_refused_by_name():
    for found in run_ranks(on_meta, 2, timeout=60):
        for message, name in zip(found, ["layer.weight", "1.weight", "table"], strict=True):
            assert message.startswith("ArgumentError: ")
            assert f"{name}, which is on the meta device" in message and "to_empty" in message


def joined(rank, world):
    net = growing(False, lambda call: 5 + rank)
    wrapper = DistributedDataParallel(net)
    with wrapper.join():
        for index in range(2 + 2 * rank):
            step(wrapper)
            net.scale.fill_(10.0 * rank + index)
    return net.scale.tolist(), net.cache.numel()


def test_under_join_buffers_follow_the_rank_that_trained_to_the_end():
    for rank, (scale, cache) in enumerate(run_ranks(joined, 2, timeout=60)):
        assert scale == [13.0, 13.0]
        assert cache == 5 + rank
