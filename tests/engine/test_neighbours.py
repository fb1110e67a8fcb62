"""What else goes on in a process: other wrappers, the user's own collectives, gradients the user holds."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.nn.functional import all_gather

from paceline.engine.ddp import DistributedDataParallel
from paceline.errors import GradientError
from tests.engine.nets import Branches, Chain, assert_gradients, gradients, mean_gradients, rank_input
from tests.ranks import run_ranks

TINY_BUCKETS = 1e-6  # MiB: one parameter in each bucket
STEPS = 3


def branches_of(rank: int) -> tuple[int, ...]:
    """Rank 0 leaves one branch out."""
    return (0, 2) if rank == 0 else (0, 1, 2)


# -- collectives that are issued in another order on each rank ---------------------------------------


class Pair(nn.Module):
    """Two networks in one loss, the second one with a branch that rank 0 does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Chain(), Branches()


def pair_backward(first, second, rank, step):
    second(first(rank_input(rank, step)), branches_of(rank)).square().sum().backward()


def two_wrappers(rank, world, with_hook):
    pair = Pair()
    wrappers = [
        DistributedDataParallel(net, bucket_cap_mb=TINY_BUCKETS, find_unused_parameters=True)
        for net in (pair.first, pair.second)
    ]
    if with_hook:
        for wrapper in wrappers:
            wrapper.register_comm_hook(None, allreduce_hook)
    found = []
    for step in range(STEPS):
        pair.zero_grad()
        pair_backward(*wrappers, rank, step)
        found.append(gradients(pair))
    return found


def test_two_wrappers_in_one_backward_do_not_meet():
    for found in run_ranks(two_wrappers, 2, False, timeout=60):
        for step, have in enumerate(found):
            wanted = mean_gradients(
                2, Pair, lambda pair, rank, step=step: pair_backward(pair.first, pair.second, rank, step)
            )
            assert_gradients(have, wanted)


def features_of_all(net, use, x):
    hidden = net(x, use)
    others = torch.cat(all_gather(hidden))
    return (hidden @ others.T).square().mean()


def collectives_in_backward(rank, world, hook, watched):
    net = Branches()
    wrapper = DistributedDataParallel(net, bucket_cap_mb=TINY_BUCKETS, find_unused_parameters=True)
    if hook:
        wrapper.register_comm_hook(None, allreduce_hook)
    if watched and rank == 0:
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    for step in range(STEPS):
        wrapper.zero_grad()
        use = (0, 1, 2) if hook else branches_of(rank)
        features_of_all(wrapper, use, rank_input(rank, step)).backward()
    return gradients(net)


@pytest.mark.parametrize(("hook", "watched"), [(False, False), (True, False), (False, True)])
def test_the_users_collectives_in_backward_do_not_meet_buckets(hook, watched):
    uses = [(0, 1, 2) if hook else branches_of(rank) for rank in range(2)]
    net = Branches()
    hidden = [net(rank_input(rank, STEPS - 1), use) for rank, use in enumerate(uses)]
    sum((mine @ torch.cat(hidden).T).square().mean() / 2 for mine in hidden).backward()
    for have in run_ranks(collectives_in_backward, 2, hook, watched, timeout=60):
        assert_gradients(have, gradients(net))


# -- wrapped again ------------------------------------------------------------------------------------


def newer_wrapper_dropped(rank, world):
    found = []
    for again in (DistributedDataParallel, copy.copy):
        net = Chain()
        older = DistributedDataParallel(net)
        newer = again(net if again is DistributedDataParallel else older)
        del newer
        gc.collect()
        older(rank_input(rank)).square().sum().backward()
        found.append(gradients(net))
    return found


def one_backward(net, rank, step=0):
    net(rank_input(rank, step)).square().sum().backward()


def test_a_wrapper_averages_again_when_the_newer_one_is_gone():
    wanted = mean_gradients(2, Chain, one_backward)
    for found in run_ranks(newer_wrapper_dropped, 2, timeout=60):
        for have in found:
            assert_gradients(have, wanted)


# -- gradients that the user holds ----------------------------------------------------------------------


def gradients_held(rank, world):
    net = Chain()
    wrapper = DistributedDataParallel(net)
    one_backward(wrapper, rank, 1)
    one_backward(wrapper, rank, 2)
    held = [p.grad for p in net.parameters()]
    wrapper.zero_grad(set_to_none=False)
    one_backward(wrapper, rank)
    return [g.clone() for g in held], all(g is p.grad for g, p in zip(held, net.parameters(), strict=True))


def gradients_put_there(rank, world):
    net = Chain()
    wrapper = DistributedDataParallel(net)
    flat = torch.zeros(sum(p.numel() for p in net.parameters()))
    pieces = flat.split([p.numel() for p in net.parameters()])
    for parameter, piece in zip(net.parameters(), pieces, strict=True):
        parameter.grad = piece.view_as(parameter)
    for step in (1, 0):
        flat.zero_()
        one_backward(wrapper, rank, step)
    return list(flat.split([p.numel() for p in net.parameters()])), True


@pytest.mark.parametrize("hold", [gradients_held, gradients_put_there])
def test_tensors_that_are_grad_all_the_time_hold_the_average(hold):
    wanted = mean_gradients(2, Chain, one_backward)
    for held, same in run_ranks(hold, 2, timeout=60):
        assert same
        for have, want in zip(held, wanted.values(), strict=True):
            torch.testing.assert_close(have.view_as(want), want)


def gradients_taken_away(rank, world):
    words = []
    for order in ("before", "after"):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 20_000))
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}

        def step_now(parameter, optimizers=optimizers):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        def hook(net=net, step_now=step_now):
            for parameter in net.parameters():
                parameter.register_post_accumulate_grad_hook(step_now)

        if order == "before":
            hook()
        wrapper = DistributedDataParallel(net)
        if order == "after":
            hook()
        with pytest.raises(GradientError) as raised:
            one_backward(wrapper, rank)
        words.append(str(raised.value))
    return words


def gradients_with_a_graph(rank, world):
    wrapper = DistributedDataParallel(Chain())
    with pytest.warns(UserWarning, match="graph of its own") as warned:
        wrapper(rank_input(rank)).square().sum().backward(create_graph=True)
    words = next(str(warning.message) for warning in warned if "averaging" in str(warning.message))
    return words, gradients(wrapper.module)


def test_gradients_that_are_taken_away_are_an_error_and_cut_graphs_a_warning():
    for words in run_ranks(gradients_taken_away, 2, timeout=60):
        for text in words:
            assert "parameter '1.bias'" in text or "parameter '1.weight'" in text
            assert "_apply_optimizer_in_backward" in text
    wanted = mean_gradients(2, Chain, one_backward)
    for text, have in run_ranks(gradients_with_a_graph, 2, timeout=60):
        assert "parameter 'c.bias'" in text and "torch.autograd.grad" in text
        assert_gradients(have, wanted)


# -- what one rank does alone -----------------------------------------------------------------------------


def looks_at_saliency(net, wrapper):
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    wrapper.eval()
    x = rank_input(0).requires_grad_()
    wrapper(x).sum().backward()
    wrapper.train()
    for parameter in net.parameters():
        parameter.requires_grad_(True)


def adds_a_module_without_parameters(net, wrapper):
    net.visualiser = nn.Identity()


def calls_with_other_weights(net, wrapper):
    weights = {name: p.detach() * 2 for name, p in wrapper.named_parameters()}
    torch.func.functional_call(wrapper, weights, (rank_input(0),))


def rank_0_alone(rank, world):
    found = []
    for act in (looks_at_saliency, adds_a_module_without_parameters, calls_with_other_weights):
        net = Chain()
        wrapper = DistributedDataParallel(net, bucket_cap_mb=TINY_BUCKETS)
        for step in (1, 2):
            wrapper.zero_grad()
            one_backward(wrapper, rank, step)
        if rank == 0:
            act(net, wrapper)
        wrapper.zero_grad()
        one_backward(wrapper, rank)
        found.append(gradients(net))
    return found


def test_what_rank_0_does_alone_without_training_disturbs_nobody():
    wanted = mean_gradients(2, Chain, one_backward)
    for found in run_ranks(rank_0_alone, 2, timeout=60):
        for have in found:
            assert_gradients(have, wanted)


def toggled(rank, world):
    net = Branches()
    wrapper = DistributedDataParallel(net, find_unused_parameters=True)

    def step(number):
        net.trunk.requires_grad_(number % 2 == 0)
        wrapper.zero_grad()
        wrapper(rank_input(rank, number), (0, 1, 2)).square().sum().backward()

    for number in range(4):
        step(number)
    calls: Counter[str] = Counter()
    kinds = ("all_reduce", "broadcast", "all_gather_object", "all_gather")

    def counted(name, original):
        def call(*arguments, **options):
            calls[name] += 1
            return original(*arguments, **options)

        return call

    patches = [mock.patch.object(dist, name, counted(name, getattr(dist, name))) for name in kinds]
    for patch in patches:
        patch.start()
    for number in range(4, 8):
        step(number)
    for patch in patches:
        patch.stop()
    return dict(calls), gradients(net)


def test_freezing_and_unfreezing_in_turn_costs_no_collective_of_its_own():
    net = Branches()
    net.trunk.requires_grad_(False)
    for rank in range(2):
        (net(rank_input(rank, 7), (0, 1, 2)).square().sum() / 2).backward()
    for calls, have in run_ranks(toggled, 2, timeout=60):
        assert calls == {"all_reduce": 4}
        assert_gradients(
            {n: g for n, g in have.items() if "trunk" not in n},
            {n: g for n, g in gradients(net).items() if "trunk" not in n},
        )


class PassesThrough(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, memory):
        return self.layer(x), memory


def memory_passed_through(rank, world):
    wrapper = DistributedDataParallel(PassesThrough())
    memory = torch.ones(1, requires_grad=True) * 2
    for _ in range(5):
        wrapper(rank_input(rank), memory)
    return len(memory._backward_hooks)


def test_a_tensor_that_is_an_output_again_and_again_is_marked_once():
    assert run_ranks(memory_passed_through, 1, timeout=60) == [1]
