"""Modules that torch.jit compiled keep their layers in containers of its own; they train as any other."""

from __future__ import annotations

import torch
from torch import nn

from paceline.engine.ddp import DistributedDataParallel
from tests.engine.nets import rank_input
from tests.ranks import run_ranks


class Plain(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4))


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.jit.script(Plain())
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.inner(x))


def scripted():
    return torch.jit.script(Plain())


def traced():
    return torch.jit.trace(Plain().train(), rank_input(0, 0), check_trace=False)


def trained(rank, world, make, wrap):
    """The gradients of three steps, what the net gives afterwards, and the keys of its state."""
    net = make()
    wrapper = wrap(net)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        wrapper(rank_input(rank, step)).square().mean().backward()
        found.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
        optimizer.step()
    wrapper.eval()
    return found, wrapper(rank_input(0, 9)).detach(), list(net.state_dict())


def trained_with_both(rank, world):
    wraps = nn.parallel.DistributedDataParallel, DistributedDataParallel
    return [[trained(rank, world, make, wrap) for make in (scripted, traced, Around)] for wrap in wraps]


def test_scripted_modules_train_as_with_torchs_class():
    found = run_ranks(trained_with_both, 2, timeout=90)
    wanted = found[0][0]
    for _, ours in found:
        torch.testing.assert_close([values for *values, _ in ours], [values for *values, _ in wanted])
        assert [keys for *_, keys in ours] == [keys for *_, keys in wanted]


def frozen_later(rank, world):
    """The gradients of a step before and a step after the first layer was frozen."""
    net = torch.jit.script(Plain())
    wrapper = DistributedDataParallel(net)
    wrapper(rank_input(rank, 0)).square().mean().backward()
    for parameter in list(net.parameters())[:2]:
        parameter.requires_grad_(False)
    wrapper.zero_grad()
    wrapper(rank_input(rank, 1)).square().mean().backward()
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def test_layers_of_a_scripted_module_can_be_frozen():
    plain = [Plain() for _ in range(2)]
    for rank, net in enumerate(plain):
        net(rank_input(rank, 1)).square().mean().backward()
    wanted = [(a.grad + b.grad) / 2 for a, b in zip(*(net.parameters() for net in plain), strict=True)]
    for gradients in run_ranks(frozen_later, 2, timeout=60):
        torch.testing.assert_close(gradients, [None, None, *wanted[2:]])
