"""What the other files leave open: a planted defect, or the fuzz, would otherwise go unnoticed."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from paceline.engine.ddp import DistributedDataParallel
from tests.engine.nets import Branches, Chain, assert_gradients, gradients, mean_gradients, rank_input
from tests.engine.test_pass import CountedCollectives, names
from tests.ranks import run_ranks

TINY_BUCKETS = 1e-6


def no_sync_left_by_an_exception(rank, world):
    net = Chain()
    wrapper = DistributedDataParallel(net)
    with contextlib.suppress(KeyError), wrapper.no_sync():
        raise KeyError("the batch has no labels")
    wrapper(rank_input(rank)).square().sum().backward()
    return gradients(net)


def test_no_sync_ends_when_an_exception_leaves_it():
    wanted = mean_gradients(2, Chain, lambda net, rank: net(rank_input(rank)).square().sum().backward())
    for found in run_ranks(no_sync_left_by_an_exception, 2, timeout=60):
        assert_gradients(found, wanted)


def replicas_at_construction(rank, world):
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    net[1].running_mean.fill_(rank)
    before = [value.clone() for value in net.state_dict().values()]
    DistributedDataParallel(net)
    return before, list(net.state_dict().values())


def test_construction_makes_parameters_and_buffers_those_of_rank_0():
    outcomes = run_ranks(replicas_at_construction, 2, timeout=60)
    rank_0s = outcomes[0][0]
    assert not torch.equal(outcomes[1][0][0], rank_0s[0])
    for _, after in outcomes:
        assert all(map(torch.equal, after, rank_0s))


def large_half_precision_gradients(rank, world):
    net = nn.Linear(2, 2, dtype=torch.float16)
    wrapper = DistributedDataParallel(net)
    sum((p * 40000.0).sum().float() for p in wrapper.module.parameters()).backward()
    return gradients(net)


def test_float16_gradients_whose_sum_overflows_have_an_average():
    for found in run_ranks(large_half_precision_gradients, 2, timeout=60):
        for gradient in found.values():
            assert torch.all(gradient == 40000.0)


def autograd_grad_through_the_wrapper(rank, world):
    net = Chain()
    wrapper = DistributedDataParallel(net, bucket_cap_mb=TINY_BUCKETS)
    x = rank_input(rank).requires_grad_()
    out = wrapper(x).sum()
    with CountedCollectives() as counted:
        torch.autograd.grad(out, [x, *net.parameters()])
    return counted.calls, gradients(net)


def test_autograd_grad_sends_nothing():
    for calls, found in run_ranks(autograd_grad_through_the_wrapper, 2, timeout=60):
        assert calls == [] and set(found.values()) == {None}


def plan_when_a_used_parameter_falls_out_of_use(rank, world):
    wrapper = DistributedDataParallel(Branches(), find_unused_parameters=True, bucket_cap_mb=TINY_BUCKETS)
    plans = []
    for use in ((0, 1, 2), (1, 2), (1, 2)):
        wrapper(rank_input(rank), use).square().sum().backward()
        plans.append(names(wrapper))
    return plans


def test_a_parameter_that_falls_out_of_use_moves_behind_all_others():
    for _, second, third in run_ranks(plan_when_a_used_parameter_falls_out_of_use, 2, timeout=60):
        assert second[-1] != ["branches.0.weight"]
        assert third[-1] == ["branches.0.weight"]
