"""On an accelerator: the same gradients, inputs moved to the rank's device, gradients of any stream.

Skips where there is none. `python -m pytest tests/gpu` is the whole check; it takes about a minute.
"""

from __future__ import annotations

import pytest
import torch

from paceline.engine.ddp import DistributedDataParallel
from tests.engine.nets import Chain, assert_gradients, gradients, mean_gradients, rank_input
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def one_backward(net, rank):
    net(rank_input(rank)).square().sum().backward()


def two_ranks_share_a_device(rank, world):
    net = Chain().cuda(0)
    wrapper = DistributedDataParallel(net, device_ids=[0], bucket_cap_mb=1e-6)
    for _ in range(3):
        wrapper.zero_grad()
        one_backward(wrapper, rank)  # the input is on the CPU: device_ids moves it
    return {name: gradient.cpu() for name, gradient in gradients(net).items()}


def test_gradients_of_two_ranks_on_one_device():
    wanted = mean_gradients(2, Chain, one_backward)
    for found in run_ranks(two_ranks_share_a_device, 2, timeout=120):
        assert_gradients(found, wanted)


def one_rank_on_nccl(rank, world):
    torch.cuda.set_device(0)
    net = Chain(width=2048).cuda()
    wrapper = DistributedDataParallel(net, device_ids=[0], bucket_cap_mb=1)
    x = torch.randn(512, 2048, device="cuda")
    for _ in range(3):
        wrapper.zero_grad()
        wrapper(x).square().mean().backward()
    own = Chain(width=2048).cuda()
    own(x).square().mean().backward()
    torch.cuda.synchronize()
    pairs = zip(net.parameters(), own.parameters(), strict=True)
    return [torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-6) for a, b in pairs]


def test_one_rank_on_nccl_equals_plain_pytorch():
    (same,) = run_ranks(one_rank_on_nccl, 1, timeout=120, backend="nccl")
    assert all(same)


def streams_of_other_work(rank, world):
    torch.cuda.set_device(0)
    net = Chain().cuda()
    wrapper = DistributedDataParallel(net, device_ids=[0])
    x = rank_input(rank).cuda()
    for _ in range(2):
        wrapper(x).sum().backward()
    wrapper.zero_grad()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # gradients are made on this stream
        wrapper(x).square().sum().backward()
        found = {n: p.grad.clone() for n, p in net.named_parameters()}
    side.synchronize()
    return {name: gradient.cpu() for name, gradient in found.items()}


def test_gradients_made_on_another_stream():
    wanted = mean_gradients(1, Chain, one_backward)
    (found,) = run_ranks(streams_of_other_work, 1, timeout=120, backend="nccl")
    assert_gradients(found, wanted)
