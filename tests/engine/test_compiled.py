"""torch.compile around the wrapper, inside it, and around whole steps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.engine.ddp import DistributedDataParallel
from tests.engine.nets import assert_gradients, gradients, mean_gradients, rank_input
from tests.ranks import run_ranks

STEPS = 4


class Normed(nn.Module):
    """A net with buffers."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


def loss_of(net, x):
    return net(x).square().sum()


def one_backward(net, rank, step=STEPS - 1):
    loss_of(net, rank_input(rank, step)).backward()


def compiled_around(net, backend, **options):
    wrapper = torch.compile(DistributedDataParallel(net), backend=backend, **options)
    return wrapper, lambda x: loss_of(wrapper, x).backward()


def compiled_dynamic(net, backend):
    return compiled_around(net, backend, dynamic=True)


def compiled_inside(net, backend):
    wrapper = DistributedDataParallel(torch.compile(net, backend=backend))
    return wrapper, lambda x: loss_of(wrapper, x).backward()


def compiled_in_place(net, backend):
    wrapper = DistributedDataParallel(net, bucket_cap_mb=1e-5)
    net.compile(backend=backend)
    return wrapper, lambda x: loss_of(wrapper, x).backward()


def compiled_loss(net, backend):
    wrapper = DistributedDataParallel(net)
    loss = torch.compile(loss_of, backend=backend)
    return wrapper, lambda x: loss(wrapper, x).backward()


def compiled_step(net, backend):
    """Backward and hooks included."""
    wrapper = DistributedDataParallel(net)

    @torch.compile(backend=backend)
    def step(x):
        loss_of(wrapper, x).backward()

    return wrapper, step


def compiled_accumulation(net, backend):
    """A micro-batch that counts for nothing under no_sync, then one that counts."""
    wrapper = DistributedDataParallel(net)

    @torch.compile(backend=backend)
    def step(x):
        with wrapper.no_sync():
            (0 * loss_of(wrapper, x)).backward()
        loss_of(wrapper, x).backward()

    return wrapper, step


FORMS = {
    form.__name__: form
    for form in (
        compiled_around,
        compiled_dynamic,
        compiled_inside,
        compiled_in_place,
        compiled_loss,
        compiled_step,
        compiled_accumulation,
    )
}


def trained(rank, form):
    """The gradients of the last step, and how many graphs had been compiled after each."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    net = Normed()
    wrapper, step = form(net, "aot_eager")
    graphs = []
    for number in range(STEPS):
        if number == STEPS - 1:
            net.load_state_dict(Normed().state_dict())
        wrapper.zero_grad()
        step(rank_input(rank, number))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return gradients(net), graphs


def trained_in_each_form(rank, world):
    return {name: trained(rank, form) for name, form in FORMS.items()}


@pytest.fixture(scope="module")
def found():
    return run_ranks(trained_in_each_form, 2, timeout=110)


@pytest.mark.parametrize("form", FORMS)
def test_compiled_training_gives_averaged_gradients(form, found):
    wanted = mean_gradients(2, Normed, one_backward)
    for of_rank in found:
        averages, graphs = of_rank[form]
        assert_gradients(averages, wanted)
        assert 0 < graphs[1] == graphs[-1]  # later passes compile nothing


def split_by_the_compiler(rank, world):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    wrapper = torch.compile(DistributedDataParallel(net, bucket_cap_mb=0.03), backend="aot_eager")
    x = rank_input(rank, width=64)
    for _ in range(3):
        wrapper.zero_grad()
        wrapper(x).square().sum().backward()
    reached, launches = [], []
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: reached.append(1))
    plain = dist.all_reduce

    def noting(*args, **kwargs):
        launches.append(len(reached))
        return plain(*args, **kwargs)

    dist.all_reduce = noting
    wrapper.zero_grad()
    wrapper(x).square().sum().backward()
    dist.all_reduce = plain
    return launches, len(list(net.parameters()))


def test_a_compiled_module_is_cut_at_bucket_borders_so_that_launches_overlap():
    for launches, count in run_ranks(split_by_the_compiler, 2, timeout=110):
        assert len(launches) > 2 and launches[-1] == count
        assert launches[0] < count  # the first bucket leaves before backward has ended
