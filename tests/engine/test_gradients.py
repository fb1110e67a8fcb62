"""Whatever a script does between forwards and backwards, every rank holds the mean over ranks.

The right value is always the mean of what plain PyTorch gives in one process on each rank's data.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.engine.ddp import DistributedDataParallel
from tests.engine.nets import Branches, Chain, assert_gradients, gradients, mean_gradients, rank_input
from tests.ranks import run_ranks

WORLD = 2
TINY_BUCKETS = 1e-6  # MiB: one parameter in each bucket


def check_everywhere(scenario, build, run, world: int = WORLD, limit: int = 60) -> None:
    """All ranks of ``scenario`` must return the gradients that ``run`` gives on average."""
    wanted = mean_gradients(world, build, run)
    for found in run_ranks(scenario, world, timeout=limit):
        assert_gradients(found, wanted)


# -- where the loss comes from ------------------------------------------------------------------


def bypassed_forward(rank, world):
    net = Chain()
    wrapper = DistributedDataParallel(net, bucket_cap_mb=TINY_BUCKETS)
    for _ in range(3):
        wrapper.zero_grad()
        wrapper.module(rank_input(rank)).square().sum().backward()
    return gradients(net)


def one_backward(net, rank):
    net(rank_input(rank)).square().sum().backward()


def test_forward_bypassed():
    check_everywhere(bypassed_forward, Chain, one_backward)


def several_forwards_and_backwards(rank, world):
    net = Chain()
    wrapper = DistributedDataParallel(net, bucket_cap_mb=TINY_BUCKETS)
    for _ in range(2):
        wrapper.zero_grad()
        losses = [wrapper(rank_input(rank, step)).square().sum() for step in range(3)]
        for loss in losses:
            loss.backward()
    return gradients(net)


def three_backwards(net, rank):
    for step in range(3):
        net(rank_input(rank, step)).square().sum().backward()


def test_several_forwards_before_several_backwards():
    check_everywhere(several_forwards_and_backwards, Chain, three_backwards)


def retained_graph(rank, world):
    net = Chain()
    wrapper = DistributedDataParallel(net, bucket_cap_mb=TINY_BUCKETS)
    out = wrapper(rank_input(rank))
    out.sum().backward(retain_graph=True)
    out.square().sum().backward()
    return gradients(net)


def two_losses(net, rank):
    out = net(rank_input(rank))
    (out.sum() + out.square().sum()).backward()


def test_several_losses_over_one_graph():
    check_everywhere(retained_graph, Chain, two_losses)


def gradient_penalty(rank, world):
    net = Chain()
    wrapper = DistributedDataParallel(net, bucket_cap_mb=TINY_BUCKETS)
    penalise(wrapper, rank)
    return gradients(net)


def penalise(net, rank):
    x = rank_input(rank).requires_grad_()
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    slope.square().sum().backward()


def test_gradient_of_a_gradient_and_autograd_grad_does_not_communicate():
    check_everywhere(gradient_penalty, Chain, penalise)


def only_rank_0_calls_autograd_grad(rank, world):
    net = Chain()
    wrapper = DistributedDataParallel(net)
    one_backward(wrapper, rank)
    if rank == 0:
        out = wrapper.module(rank_input(rank)).sum()
        torch.autograd.grad(out, list(net.parameters()))
        x = rank_input(rank).requires_grad_()
        torch.autograd.grad(wrapper(x).sum(), x)
    wrapper.zero_grad()
    wrapper.module(rank_input(rank)).square().sum().backward()
    return gradients(net)


def test_autograd_grad_on_one_rank_alone():
    with pytest.raises(AssertionError, match="out of step"):
        # a training forward that only one rank runs cannot be told from a skipped backward
        run_ranks(only_rank_0_calls_autograd_grad, WORLD, timeout=60)


# -- no_sync ------------------------------------------------------------------------------------


def accumulate(rank, world):
    net = Chain()
    wrapper = DistributedDataParallel(net, bucket_cap_mb=TINY_BUCKETS)
    for _ in range(3):
        wrapper.zero_grad()
        with wrapper.no_sync():
            for step in range(2):
                wrapper(rank_input(rank, step)).square().sum().backward()
        own = gradients(net)
        wrapper(rank_input(rank, 2)).square().sum().backward()
    return own, gradients(net)


def test_no_sync_keeps_gradients_local_until_the_next_backward():
    mean = mean_gradients(WORLD, Chain, three_backwards)
    for rank, (own, total) in enumerate(run_ranks(accumulate, WORLD, timeout=60)):
        local = Chain()
        for step in range(2):
            local(rank_input(rank, step)).square().sum().backward()
        assert_gradients(own, gradients(local))
        assert_gradients(total, mean)


def no_sync_around_one_of_them(rank, world):
    net = Chain()
    wrapper = DistributedDataParallel(net, bucket_cap_mb=TINY_BUCKETS)
    loss = wrapper(rank_input(rank)).square().sum()
    with wrapper.no_sync():
        loss.backward()
    before = gradients(net)
    wrapper.zero_grad()
    with wrapper.no_sync():
        loss = wrapper(rank_input(rank)).square().sum()
    loss.backward()
    return before, gradients(net)


def test_no_sync_counts_when_backward_starts_not_in_forward():
    mean = mean_gradients(WORLD, Chain, one_backward)
    for rank, (inside, outside) in enumerate(run_ranks(no_sync_around_one_of_them, WORLD, timeout=60)):
        local = Chain()
        one_backward(local, rank)
        assert_gradients(inside, gradients(local))
        assert_gradients(outside, mean)


# -- parameters that take no part ------------------------------------------------------------


def branches_by_rank(rank, world, steps):
    net = Branches()
    wrapper = DistributedDataParallel(net, find_unused_parameters=True, bucket_cap_mb=TINY_BUCKETS)
    found = []
    for step in range(steps):
        wrapper.zero_grad()
        wrapper(rank_input(rank, step), branches_used(rank, step)).square().sum().backward()
        found.append(gradients(net))
    return found


def branches_used(rank, step):
    """Other branches on every rank and step; branch 2 on no rank in even steps."""
    return [(0,), (0, 1), (1,), ()][(rank + step) % 4] + ((2,) if step % 2 else ())


@pytest.mark.parametrize("world", [2, 4])
def test_unused_parameters_get_the_mean_with_zeros_or_stay_none(world):
    outcomes = run_ranks(branches_by_rank, world, 5, timeout=90)
    for step in range(5):

        def run(net, rank, step=step):
            net(rank_input(rank, step), branches_used(rank, step)).square().sum().backward()

        wanted = mean_gradients(world, Branches, run)
        for found in outcomes:
            assert_gradients(found[step], wanted)


def unused_and_not_allowed(rank, world):
    net = Branches()
    wrapper = DistributedDataParallel(net)
    use = (0, 1, 2) if rank == 0 else (0, 1)
    wrapper(rank_input(rank), use).square().sum().backward()
    first = gradients(net)
    try:
        wrapper(rank_input(rank), use)
    except Exception as error:
        return first, f"{type(error).__name__}: {error}"
    return first, None


def test_unused_parameters_without_permission_average_and_then_raise_on_every_rank():
    def run(net, rank):
        net(rank_input(rank), (0, 1, 2) if rank == 0 else (0, 1)).square().sum().backward()

    wanted = mean_gradients(WORLD, Branches, run)
    for rank, (first, message) in enumerate(run_ranks(unused_and_not_allowed, WORLD, timeout=60)):
        assert_gradients(first, wanted)
        assert message is not None and message.startswith("UnusedParametersError")
        assert "branches.2.weight" in message and "branches.1.weight" not in message
        assert f"Rank {rank}" in message and "find_unused_parameters=True" in message


def used_in_an_earlier_micro_batch(rank, world):
    wrapper = DistributedDataParallel(Branches())
    for _ in range(2):
        with wrapper.no_sync():
            wrapper(rank_input(rank), (0, 1, 2)).sum().backward()
        wrapper(rank_input(rank), (0,)).sum().backward()


def test_a_parameter_used_in_any_micro_batch_of_the_step_is_used():
    run_ranks(used_in_an_earlier_micro_batch, WORLD, timeout=60)


# -- a module that changes after wrapping -------------------------------------------------------


def change_and_train(rank, world, change):
    torch.manual_seed(rank)
    net = Chain()
    net.a.requires_grad_(False)
    wrapper = DistributedDataParallel(net, bucket_cap_mb=TINY_BUCKETS)
    one_backward(wrapper, rank)
    wrapper.zero_grad()
    torch.manual_seed(50 + rank)  # what is made anew differs between ranks until the wrapper sees it
    change(net)
    weights = []
    for _ in range(2):
        wrapper.zero_grad()
        one_backward(wrapper, rank)
        weights.append({n: p.detach().clone() for n, p in net.named_parameters()})
    return weights[0], gradients(net)


def unfreeze(net):
    net.a.requires_grad_(True)


def freeze(net):
    net.b.requires_grad_(False)
    net.b.zero_grad()


def replace_parameter(net):
    net.b.weight = nn.Parameter(torch.randn(4, 4))


def replace_layer(net):
    net.c = nn.Linear(4, 4)


def convert(net):
    net.double().float()


@pytest.mark.parametrize("change", [unfreeze, freeze, replace_parameter, replace_layer, convert])
def test_parameters_changed_after_wrapping_are_averaged_and_equal(change):
    outcomes = run_ranks(change_and_train, WORLD, change, timeout=60)
    weights = outcomes[0][0]

    def build():
        net = Chain()
        net.a.requires_grad_(False)
        change(net)
        net.load_state_dict(weights)
        return net

    wanted = mean_gradients(WORLD, build, one_backward)
    for held, found in outcomes:
        assert all(torch.equal(held[name], weights[name]) for name in weights)
        assert_gradients(found, wanted)


def change_without_a_backward_between(rank, world, again_through_wrapper):
    net = Chain()
    wrapper = DistributedDataParallel(net)
    wrapper(rank_input(rank))  # no backward follows
    net.b = nn.Linear(4, 4)
    net.b.load_state_dict(Chain().b.state_dict())
    one_backward(wrapper if again_through_wrapper else net, rank)
    return gradients(net)


@pytest.mark.parametrize("again_through_wrapper", [True, False])
def test_a_module_that_changes_after_a_forward_without_backward(again_through_wrapper):
    wanted = mean_gradients(WORLD, Chain, one_backward)
    for found in run_ranks(change_without_a_backward_between, WORLD, again_through_wrapper, timeout=60):
        assert_gradients(found, wanted)


# -- checkpointing ------------------------------------------------------------------------------


class SharedBlock(nn.Module):
    """One block run three times under activation checkpointing, between two other layers."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.first, self.block, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = torch.tanh(checkpoint(self.block, x, use_reentrant=self.reentrant))
        return self.last(x)


def shared_block(rank, world, reentrant, options):
    net = SharedBlock(reentrant)
    wrapper = DistributedDataParallel(net, bucket_cap_mb=TINY_BUCKETS, **options)
    found = []
    for _ in range(3):
        wrapper.zero_grad()
        one_backward(wrapper, rank)
        found.append(gradients(net))
    return found


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_gradient_that_comes_after_its_bucket_was_launched_is_not_lost(reentrant, options):
    wanted = mean_gradients(WORLD, lambda: SharedBlock(reentrant), one_backward)
    for found in run_ranks(shared_block, WORLD, reentrant, options, timeout=60):
        for step in found:
            assert_gradients(step, wanted)


# -- storage ------------------------------------------------------------------------------------


def kept_gradients(rank, world, views):
    net = Chain()
    wrapper = DistributedDataParallel(net, gradient_as_bucket_view=views)
    one_backward(wrapper, rank)
    wrapper.zero_grad()
    one_backward(wrapper, rank)
    kept = [p.grad for p in net.parameters()]
    values = [g.clone() for g in kept]
    storages = {g.untyped_storage().data_ptr() for g in kept}
    wrapper.zero_grad(set_to_none=True)
    wrapper(10 * rank_input(rank)).sum().backward()
    same_memory = [g.data_ptr() == p.grad.data_ptr() for g, p in zip(kept, net.parameters(), strict=True)]
    return len(storages), all(map(torch.equal, kept, values)), same_memory


def test_gradients_share_one_storage_and_kept_ones_stay_as_they_are():
    for storages, intact, _ in run_ranks(kept_gradients, WORLD, False, timeout=60):
        assert storages == 1 and intact


def test_with_bucket_views_the_memory_is_used_again():
    for storages, _, same_memory in run_ranks(kept_gradients, WORLD, True, timeout=60):
        assert storages == 1 and all(same_memory)


def dtypes_and_strides(rank, world):
    net = nn.ModuleDict(
        {
            "image": nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
            "fp16": nn.Linear(2, 2, dtype=torch.float16),
            "bf16": nn.Linear(2, 2, dtype=torch.bfloat16),
            "fp64": nn.Linear(2, 2, dtype=torch.float64),
        }
    )
    net.register_parameter("waves", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    wrapper = DistributedDataParallel(net, bucket_cap_mb=TINY_BUCKETS)
    scale = 40000.0 if rank == 0 else 20000.0
    loss = sum((p * scale).abs().sum().double() for p in wrapper.module.parameters())
    loss.backward()
    return [
        (n, p.stride() == p.grad.stride(), p.grad.abs().double().max().item())
        for n, p in net.named_parameters()
    ]


def test_every_dtype_and_stride_and_no_overflow_in_half_precision():
    for outcome in run_ranks(dtypes_and_strides, WORLD, timeout=60):
        for name, same_strides, largest in outcome:
            assert same_strides, name
            assert largest == pytest.approx(30000.0, rel=1e-2), name


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.sometimes = (nn.Embedding(6, 2, sparse=True) for _ in range(2))
        self.dense = nn.Linear(2, 1)

    def forward(self, rows, both):
        x = self.used(rows)
        return self.dense(x + self.sometimes(rows) if both else x)


def sparse_tables(rank, world):
    net = TwoTables()
    wrapper = DistributedDataParallel(net, find_unused_parameters=True)
    found = []
    for step in range(3):
        wrapper.zero_grad()
        wrapper(torch.tensor([rank, step, 5]), both=rank == 0 and step == 1).sum().backward()
        layout = net.used.weight.grad.layout
        found.append((layout, gradients(net)))
    return found


def test_sparse_gradients_on_all_ranks_some_ranks_and_none():
    outcomes = run_ranks(sparse_tables, WORLD, timeout=60)
    for step in range(3):

        def run(net, rank, step=step):
            net(torch.tensor([rank, step, 5]), both=rank == 0 and step == 1).sum().backward()

        wanted = mean_gradients(WORLD, TwoTables, run)
        for found in outcomes:
            layout, step_gradients = found[step]
            assert layout is torch.sparse_coo
            assert_gradients(step_gradients, wanted)


def conv_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))


def image_backward(net, rank, step=0):
    generator = torch.Generator().manual_seed(10 * step + rank)
    net(torch.randn(2, 3, 8, 8, generator=generator)).square().mean().backward()


def assign_data(net):
    for parameter in net.parameters():
        parameter.grad.data = parameter.grad.data.clamp(-1, 1).clone()


MOVES = {
    "grad.data assigned": assign_data,
    "channels_last": lambda net: net.to(memory_format=torch.channels_last),
    "double and back": lambda net: net.double().float(),
    "shared between processes": lambda net: net.share_memory(),
}


def gradients_after_moving(rank, world):
    found = {}
    for move, as_views, set_to_none in itertools.product(MOVES, (False, True), (False, True)):
        net = conv_net()
        wrapper = DistributedDataParallel(net, gradient_as_bucket_view=as_views)
        for step in range(2):  # the second one after buckets were laid out anew
            wrapper.zero_grad()
            image_backward(wrapper, rank, step)
        MOVES[move](net)
        wrapper.zero_grad(set_to_none)
        image_backward(wrapper, rank)
        found[move, as_views, set_to_none] = gradients(net)
    return found


def test_gradients_that_were_moved_to_other_memory_are_averaged_all_the_same():
    wanted = mean_gradients(2, conv_net, image_backward)
    for found in run_ranks(gradients_after_moving, 2, timeout=60):
        assert len(found) == 4 * len(MOVES)
        for have in found.values():
            assert_gradients(have, wanted)


def large_sparse_gradients(rank, world, dtype):
    table = nn.Embedding(3, 2, sparse=True, dtype=dtype)
    wrapper = DistributedDataParallel(table, find_unused_parameters=True)
    (wrapper(torch.tensor([rank, 2])) * 40_000).sum().backward()
    return table.weight.grad.dtype, table.weight.grad.to_dense().double()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_sparse_gradients_of_every_precision_have_an_average_that_does_not_overflow(dtype):
    large = torch.tensor(40_000.0, dtype=dtype).double()
    wanted = torch.stack([large / 2, large / 2, large]).unsqueeze(1).expand(3, 2)
    for have_dtype, have in run_ranks(large_sparse_gradients, 2, dtype, timeout=60):
        assert have_dtype is dtype
        torch.testing.assert_close(have, wanted, rtol=1e-2, atol=0)


def three_ranks_average(rank, world):
    net = Chain()
    wrapper = DistributedDataParallel(net)
    one_backward(wrapper, rank)
    mine = torch.cat([p.grad.flatten() for p in net.parameters()])
    everyones = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everyones, mine)
    return gradients(net), all(torch.equal(mine, other) for other in everyones)


@pytest.mark.parametrize("world", [1, 3])
def test_any_number_of_ranks_holds_bit_identical_averages(world):
    wanted = mean_gradients(world, Chain, one_backward)
    for found, identical in run_ranks(three_ranks_average, world, timeout=60):
        assert identical
        assert_gradients(found, wanted)
