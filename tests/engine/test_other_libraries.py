"""Libraries that ask whether a wrapper is torch's class, and what they do with it then."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchClass

from paceline.engine.ddp import DistributedDataParallel
from tests.engine.nets import Chain, gradients, rank_input
from tests.ranks import run_ranks


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def shapes(state):
    """Nested dictionaries of tensors as dictionaries of their shapes."""
    if isinstance(state, dict):
        return {key: shapes(value) for key, value in state.items()}
    return tuple(state.shape) if isinstance(state, torch.Tensor) else state


def torchs_state_dict_helpers(rank, world, wrapper_class, arrangement):
    from torch.distributed.checkpoint import state_dict as helpers

    torch.manual_seed(0)
    wrapper = wrapper_class(Chain())
    model = {"alone": lambda: wrapper, "inside": lambda: Holder(wrapper)}[arrangement]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(number):
        optimizer.zero_grad()
        model(rank_input(rank, number)).square().sum().backward()
        optimizer.step()

    step(0)
    saved = copy.deepcopy(helpers.get_state_dict(model, optimizer))
    step(1)
    step(2)
    missing, unexpected = helpers.set_state_dict(
        model, optimizer, model_state_dict=copy.deepcopy(saved[0]), optim_state_dict=copy.deepcopy(saved[1])
    )
    restored = helpers.get_state_dict(model, optimizer)
    same = all(torch.equal(restored[0][key], value) for key, value in saved[0].items())
    steps = {float(state["step"]) for state in optimizer.state.values()}
    flat = helpers.get_optimizer_state_dict(
        model, optimizer, options=helpers.StateDictOptions(flatten_optimizer_state_dict=True)
    )
    return shapes(saved[0]), shapes(saved[1]), sorted(flat), (same, steps, missing, unexpected)


@pytest.mark.parametrize("arrangement", ["alone", "inside"])
def test_torchs_state_dict_helpers_treat_a_wrapper_as_they_treat_torchs(arrangement):
    ours = run_ranks(torchs_state_dict_helpers, 2, DistributedDataParallel, arrangement, timeout=60)
    theirs = run_ranks(torchs_state_dict_helpers, 2, TorchClass, arrangement, timeout=60)
    assert ours == theirs
    assert ours[0][3] == (True, {1.0}, [], [])


def under_accelerate(rank, world):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = Chain()
    wrapper = DistributedDataParallel(net)
    assert isinstance(wrapper, TorchClass)
    assert issubclass(DistributedDataParallel, TorchClass)
    assert not isinstance(net, TorchClass)
    unwrapped = accelerator.unwrap_model(wrapper) is net
    with wrapper.no_sync():
        losses = [wrapper(rank_input(rank, step)).square().sum() for step in range(2)]
        losses[0].backward()
        with accelerator.trigger_sync_in_backward(wrapper):
            losses[1].backward()
    return unwrapped, gradients(net)


def test_accelerate_unwraps_it_and_triggers_its_averaging():
    pytest.importorskip("accelerate")
    net = Chain()
    for rank in range(2):
        for step in range(2):
            (net(rank_input(rank, step)).square().sum() / 2).backward()
    for unwrapped, averages in run_ranks(under_accelerate, 2, timeout=90):
        assert unwrapped
        for name, want in gradients(net).items():
            torch.testing.assert_close(averages[name], want)


def one_stage_pipeline(rank, world):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    groups = [dist.new_group([other]) for other in range(world)]
    net = Chain()
    wrapper = DistributedDataParallel(net)
    stage = PipelineStage(wrapper, 0, 1, torch.device("cpu"), group=groups[rank])
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda y, target: (y - target).square().mean())
    x = torch.cat([rank_input(rank, 0), rank_input(rank, 1)])
    schedule.step(x, target=torch.zeros_like(net(x).detach()))
    return gradients(net)


def test_a_pipeline_stage_averages_once_per_step():
    net = Chain()
    for rank in range(2):
        x = torch.cat([rank_input(rank, 0), rank_input(rank, 1)])
        (net(x).square().mean() / 2).backward()
    for averages in run_ranks(one_stage_pipeline, 2, timeout=60):
        for name, want in gradients(net).items():
            torch.testing.assert_close(averages[name], want)


def optimizer_fused_into_reduction(rank, world, subset):
    net = Chain()
    wrapper = DistributedDataParallel(net)
    chosen = {"optim_params": [next(iter(net.parameters()))]} if subset else {}
    wrapper._register_fused_optim(torch.optim.SGD, 0.1, **chosen)
    for step in range(3):
        wrapper.zero_grad()
        wrapper(rank_input(rank, step)).square().sum().backward()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("subset", [False, True])
def test_an_optimizer_fused_into_reduction_steps_with_the_averages(subset):
    net = Chain()
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(parameters[:1] if subset else parameters, lr=0.1)
    for step in range(3):
        net.zero_grad()
        (sum(net(rank_input(rank, step)).square().sum() for rank in range(2)) / 2).backward()
        optimizer.step()
    for weights in run_ranks(optimizer_fused_into_reduction, 2, subset, timeout=60):
        for have, want in zip(weights, parameters, strict=True):
            torch.testing.assert_close(have, want.detach())


def optimizer_without_functional_form(rank, world):
    with pytest.raises(ValueError, match="LBFGS"):
        DistributedDataParallel(Chain())._register_fused_optim(torch.optim.LBFGS, 0.1)


def test_an_optimizer_without_a_functional_form_is_refused():
    run_ranks(optimizer_without_functional_form, 1, timeout=60)
