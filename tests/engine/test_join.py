"""Several wrappers and sharded optimizers joined together, against one process on the data of the ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

from paceline.engine.ddp import DistributedDataParallel
from tests.engine.nets import Chain, rank_input
from tests.ranks import run_ranks


class Normalised(nn.Sequential):
    def __init__(self):
        torch.manual_seed(1)
        super().__init__(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4))


def sgd(wrapper):
    return torch.optim.SGD(wrapper.parameters(), lr=0.1)


def sharded(wrapper):
    return ZeroRedundancyOptimizer(wrapper.parameters(), torch.optim.SGD, lr=0.1)


def trained_together(rank, world, nets, optimizers):
    """Each net takes its own backward and step in every iteration; rank 1 has more of them."""
    nets = [net() for net in nets]
    wrappers = [DistributedDataParallel(net) for net in nets]
    optimizers = [make(wrapper) for make, wrapper in zip(optimizers, wrappers, strict=True)]
    joined = [*wrappers, *(each for each in optimizers if isinstance(each, ZeroRedundancyOptimizer))]
    with Join(joined):
        for step in range(3 + 2 * rank):
            for wrapper, optimizer in zip(wrappers, optimizers, strict=True):
                optimizer.zero_grad()
                wrapper(rank_input(rank, step)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    return [net.state_dict() for net in nets]


ARRANGEMENTS = (
    ((Chain, Chain), (sgd, sgd)),
    ((Chain, Normalised, Chain), (sgd, sgd, sgd)),
    ((Normalised, Chain), (sharded, sharded)),
)


def every_arrangement(rank, world):
    return [trained_together(rank, world, *arrangement) for arrangement in ARRANGEMENTS]


def in_one_process(net):
    """The sum over the ranks with data, divided by two; buffers are those of the highest such rank."""
    model, replicas = net(), [net(), net()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        with_data = [rank for rank in range(2) if step < 3 + 2 * rank]
        for rank in with_data:
            replicas[rank].load_state_dict(model.state_dict())
            replicas[rank].zero_grad()
            replicas[rank](rank_input(rank, step)).square().mean().backward()
        for name, parameter in model.named_parameters():
            parameter.grad = sum(replicas[rank].get_parameter(name).grad for rank in with_data) / 2
        optimizer.step()
        for name, buffer in model.named_buffers():
            buffer.copy_(replicas[with_data[-1]].get_buffer(name))
    return model.state_dict()


def test_wrappers_joined_together():
    for found in run_ranks(every_arrangement, 2, timeout=90):
        for (nets, _), states in zip(ARRANGEMENTS, found, strict=True):
            torch.testing.assert_close(states, [in_one_process(net) for net in nets])
