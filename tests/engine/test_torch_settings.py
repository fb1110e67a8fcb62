"""What a script sets for all of torch is for its own tensors: the wrapper's are on the module's device."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
import torch
from torch import nn

from paceline.engine.ddp import DistributedDataParallel
from tests.engine.nets import rank_input
from tests.ranks import run_ranks


class EveryKind(nn.Module):
    """A parameter with sparse gradient, some that are not always used, and sparse buffers if asked for."""

    def __init__(self, sparse_buffers):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 4, sparse=True)
        self.norm = nn.BatchNorm1d(4)
        self.head, self.spare = nn.Linear(4, 2), nn.Linear(4, 2)
        if sparse_buffers:
            self.register_buffer("coo", torch.eye(3).to_sparse_coo(), persistent=False)
            self.register_buffer("csr", torch.eye(3).to_sparse_csr(), persistent=False)

    def forward(self, x, spare):
        hidden = self.norm(x + self.table(torch.arange(len(x), device=x.device)))
        return (self.spare if spare else self.head)(hidden)


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SETTINGS = {
    "nothing": contextlib.nullcontext,
    "device": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "float16": lambda: default_dtype(torch.float16),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "deterministic": deterministic,
}


def trained(rank, world, setting, by_torch=False):
    """Parameters after four steps, and one or two more: ranks run out at different times."""
    net = EveryKind(sparse_buffers=not by_torch)
    inputs = [rank_input(rank, step) for step in range(6)]
    with SETTINGS[setting]():
        wrap = nn.parallel.DistributedDataParallel if by_torch else DistributedDataParallel
        wrapper = wrap(net, find_unused_parameters=True)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)

        def steps(batches):
            for number, batch in enumerate(batches):
                optimizer.zero_grad()
                wrapper(batch, number % 2 == rank % 2).square().mean().backward()
                optimizer.step()

        steps(inputs[:4])
        with wrapper.join():
            steps(inputs[4 : 5 + rank])
        if not by_torch:
            wrapper.verify_replicas()
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


@pytest.fixture(scope="module")
def wanted():
    return run_ranks(trained, 2, "nothing", True, backend="gloo", timeout=60)


@pytest.mark.parametrize("setting", SETTINGS)
def test_training_does_not_depend_on_defaults(setting, wanted):
    torch.testing.assert_close(run_ranks(trained, 2, setting, timeout=60), wanted)


def random_states():
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def random_numbers_drawn(rank, world):
    """Whether wrapping and training without dropout moved a generator on."""
    net = EveryKind(sparse_buffers=True)
    torch.manual_seed(rank)
    before = random_states()
    wrapper = DistributedDataParallel(net, find_unused_parameters=True, verify_replicas_every=1)
    for step in range(3):
        wrapper(rank_input(rank, step), rank == 0).square().mean().backward()
    return random_states() != before


def test_wrapping_draws_no_random_numbers():
    assert run_ranks(random_numbers_drawn, 2, timeout=60) == [False, False]
