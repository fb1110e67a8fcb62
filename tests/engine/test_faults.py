"""When a rank fails, the others are told which one, and nobody waits for ever."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

from paceline.engine.ddp import DistributedDataParallel
from tests.engine.nets import (
    Chain,
    FailsInBackward,
    assert_gradients,
    gradients,
    mean_gradients,
    rank_input,
)
from tests.ranks import rank_outcomes, run_ranks

TINY_BUCKETS = 1e-6


class Fragile(Chain):
    """Backward may raise when the gradients of the last layer are there and others are not."""

    def forward(self, x, fails=False):
        return self.c(FailsInBackward.apply(torch.tanh(self.b(torch.tanh(self.a(x)))), fails))


def caught(call) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def exception_in_the_middle_of_backward(rank, world, failing):
    net = Fragile()
    wrapper = DistributedDataParallel(net, bucket_cap_mb=TINY_BUCKETS)
    messages = []
    for step in range(4):
        wrapper.zero_grad()
        fails = step == 1 and rank in failing
        messages.append(
            caught(lambda fails=fails: wrapper(rank_input(rank), fails).square().sum().backward())
        )
    return messages, gradients(net)


@pytest.mark.parametrize("failing", [(1,), (0,), (0, 1)])
def test_after_an_exception_in_backward_every_rank_knows_and_training_goes_on(failing):
    def run(net, rank):
        net(rank_input(rank)).square().sum().backward()

    wanted = mean_gradients(2, Fragile, run)
    for rank, (messages, found) in enumerate(
        run_ranks(exception_in_the_middle_of_backward, 2, failing, timeout=60)
    ):
        assert [message for step, message in enumerate(messages) if step != 1] == ["fine"] * 3
        if rank in failing:
            assert messages[1] == "ValueError: bad sample 4711"
        else:
            assert messages[1].startswith("PeerFailedError")
            assert f"on rank {failing[0]}" in messages[1] and "backward pass 2" in messages[1]
        assert_gradients(found, wanted)


def skipped_backward(rank, world):
    net = Chain()
    wrapper = DistributedDataParallel(net)
    messages = []
    for step in range(5):
        wrapper.zero_grad()
        loss = wrapper(rank_input(rank, step)).square().sum()
        if step == 2 and rank == 1:
            continue
        messages.append(caught(loss.backward))
        if messages[-1] != "fine":
            break
    return messages


def test_a_skipped_backward_is_an_error_on_every_rank_and_not_a_wrong_average():
    for messages in run_ranks(skipped_backward, 2, timeout=60):
        assert messages[:2] == ["fine", "fine"]
        assert messages[2].startswith("RanksOutOfStepError") and "[3, 4]" in messages[2]


class RunsOutOnce(nn.Module):
    """Its forward raises once on rank 1, in the middle, as where memory runs out."""

    def __init__(self, rank, normalised):
        super().__init__()
        self.body, self.fails = Chain(), rank == 1
        self.norm = nn.BatchNorm1d(4) if normalised else nn.Identity()

    def forward(self, x):
        hidden = self.body(x)
        if self.fails:
            self.fails = False
            raise MemoryError("too large")
        return self.norm(hidden)


def tried_again(rank, world, normalised):
    net = RunsOutOnce(rank, normalised)
    wrapper = DistributedDataParallel(net)
    for step in range(3):
        wrapper.zero_grad()
        try:
            loss = wrapper(rank_input(rank, step)).square().sum()
        except MemoryError:
            loss = wrapper(rank_input(rank, step)).square().sum()
        loss.backward()
    return gradients(net)


@pytest.mark.parametrize("normalised", [False, True])
def test_a_forward_that_raised_on_one_rank_can_be_tried_again(normalised):
    nets = [RunsOutOnce(0, normalised) for _ in range(2)]
    for rank, net in enumerate(nets):
        net(rank_input(rank, 2)).square().sum().backward()
    wanted = {name: (p.grad + nets[1].get_parameter(name).grad) / 2 for name, p in nets[0].named_parameters()}
    for found in run_ranks(tried_again, 2, normalised, timeout=60):
        assert_gradients(found, wanted)


def freeze_a(net):
    net.a.requires_grad_(False)


def thaw_b(net):
    net.b.requires_grad_(True)


CHANGES = {
    freeze_a: "stopped training a.bias, a.weight",
    thaw_b: "begun to train b.bias, b.weight",
}


def changed_unlike_the_others(rank, world, change, other_change, options):
    net = Chain()
    net.b.requires_grad_(False)
    wrapper = DistributedDataParallel(net, **options)

    def step(wrapper, number):
        return caught(lambda: wrapper(rank_input(rank, number)).square().sum().backward())

    messages = [step(wrapper, 0), step(wrapper, 1)]
    if rank == 1:
        change(net)
    elif rank == 0 and other_change is not None:
        other_change(net)
    messages += [step(wrapper, 2), step(wrapper, 3)]
    for parameter in net.parameters():
        parameter.requires_grad_(True)
    net.zero_grad()
    messages.append(step(DistributedDataParallel(net), 4))
    return messages, gradients(net)


@pytest.mark.parametrize(
    ("change", "other_change"), [(freeze_a, None), (thaw_b, None), (freeze_a, thaw_b)], ids=["a", "b", "both"]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": TINY_BUCKETS},
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    ],
    ids=["", "tiny", "skipping"],
)
def test_parameters_changed_on_some_ranks_alone_are_an_error_that_says_what_each_changed(
    change, other_change, options
):
    def run(net, rank):
        net(rank_input(rank, 4)).square().sum().backward()

    wanted = mean_gradients(3, Chain, run)
    found = run_ranks(changed_unlike_the_others, 3, change, other_change, options, timeout=60)
    for rank, (messages, gradients_found) in enumerate(found):
        assert messages[:2] == ["fine", "fine"]
        for message in messages[2:4]:
            assert message.startswith(f"RanksOutOfStepError: rank {rank}, backward pass 3")
            assert f"rank 1 has {CHANGES[change]}" in message and "rank 2 has changed nothing" in message
            assert f"rank 0 has {CHANGES.get(other_change, 'changed nothing')}" in message
        assert messages[4] == "fine"
        assert_gradients(gradients_found, wanted)


def failing_hook(rank, world, failing_bucket):
    net = Chain()
    wrapper = DistributedDataParallel(net, process_group=dist.new_group(), bucket_cap_mb=TINY_BUCKETS)
    calls = []

    def hook(state, bucket):
        calls.append(bucket.index())
        if rank == 1 and len(calls) > 6 and bucket.index() == failing_bucket:
            raise ValueError("no scale for this bucket")
        return default_hooks.allreduce_hook(wrapper.process_group, bucket)

    wrapper.register_comm_hook(None, hook)

    def step(wrapper, number):
        return caught(lambda: wrapper(rank_input(rank, number)).square().sum().backward())

    messages = [step(wrapper, number) for number in range(3)]
    net.zero_grad()
    messages.append(step(DistributedDataParallel(net), 3))
    return messages, gradients(net)


@pytest.mark.parametrize("failing_bucket", [0, 2])
def test_a_communication_hook_that_raises_on_one_rank_is_an_error_on_all(failing_bucket):
    def run(net, rank):
        net(rank_input(rank, 3)).square().sum().backward()

    wanted = mean_gradients(3, Chain, run)
    for rank, (messages, found) in enumerate(run_ranks(failing_hook, 3, failing_bucket, timeout=60)):
        fine, here, afterwards, wrapped_again = messages
        assert fine == wrapped_again == "fine"
        if rank == 1:
            assert here == "ValueError: no scale for this bucket"
        else:
            assert here.startswith(f"PeerFailedError: rank {rank}, backward pass 2")
        for message in [afterwards, *([here] if rank != 1 else [])]:
            assert "rank 1 has raised ValueError: no scale for this bucket in its" in message
        assert_gradients(found, wanted)


def different_models(rank, world, kind):
    net = {
        "shape": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3 + rank)),
        "dtype": lambda: nn.Sequential(
            nn.Linear(4, 4), nn.Linear(4, 3, dtype=[torch.float32, torch.float64][rank])
        ),
        "extra": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), *[nn.Linear(3, 3)] * rank),
        "order": lambda: nn.ModuleDict({name: nn.Linear(4, 4) for name in ("ab", "ba")[rank]}),
    }[kind]()
    started = time.monotonic()
    return caught(lambda: DistributedDataParallel(net)), time.monotonic() - started


@pytest.mark.parametrize(
    ("kind", "named"),
    [("shape", "1.weight"), ("dtype", "1.weight"), ("extra", "2.weight"), ("order", "a.weight")],
)
def test_different_models_raise_in_the_constructor_on_every_rank(kind, named):
    for message, _ in run_ranks(different_models, 2, kind, timeout=60):
        assert message.startswith("ReplicaMismatchError")
        assert named in message and "rank 0" in message and "rank 1" in message


def train_until_told(rank, world, fault):
    wrapper = DistributedDataParallel(Chain())
    for step in range(6):
        wrapper.zero_grad()
        loss = wrapper(rank_input(rank, step)).square().sum()
        if rank == world - 1 and step == 3:
            fault()
        try:
            loss.backward()
        except Exception as error:
            return f"{type(error).__name__}: {error}", step
    return "fine", 6


class RaisesInForward(Chain):
    def forward(self, x, fails):
        if fails:
            raise ValueError("bad sample 4711")
        return super().forward(x)


def dies_of_an_exception(rank, world):
    wrapper = DistributedDataParallel(RaisesInForward())
    for step in range(3):
        try:
            wrapper(rank_input(rank, step), fails=rank == 1 and step == 1).sum().backward()
        except ValueError:
            os._exit(1)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "fine"


def test_the_exception_of_a_rank_that_died_of_it_is_told_to_the_others():
    outcomes = rank_outcomes(dies_of_an_exception, 2, timeout=60)
    message = outcomes[0].value
    assert message.startswith("PeerLostError") and "Rank 1 had raised ValueError: bad sample 4711" in message


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


def leaving():
    os._exit(0)  # as after sys.exit(0): a rank that left early counts as lost, too


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("fault", [killed, leaving])
def test_a_rank_that_dies_is_named_by_all_others(world, fault):
    outcomes = rank_outcomes(train_until_told, world, fault, timeout=60)
    for outcome in outcomes[:-1]:
        message, step = outcome.value
        assert step == 3
        assert message.startswith("PeerLostError"), message
        assert f"rank {world - 1}" in message and f"rank {outcome.rank}: backward pass 4" in message


def test_a_rank_that_stops_is_named_when_the_timeout_has_passed():
    outcomes = rank_outcomes(train_until_told, 2, stopped, timeout=12, group_timeout=3)
    message, step = outcomes[0].value
    assert step == 3
    assert message.startswith("CollectiveTimeoutError"), message
    assert "rank 1 did not come" in message and "(c.bias, ..., a.weight)" in message


class Normalised(Chain):
    """Its buffers are broadcast in forward."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(super().forward(x))


def never_comes_to_forward(rank, world, fault):
    wrapper = DistributedDataParallel(Normalised())
    for step in range(4):
        wrapper.zero_grad()
        if rank == 0 and step == 2:
            fault()
        try:
            wrapper(rank_input(rank, step)).square().sum().backward()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize("fault", [killed, stopped])
def test_a_rank_that_never_comes_to_a_broadcast_in_forward_is_named(fault):
    kind = {killed: "PeerLostError", stopped: "CollectiveTimeoutError"}[fault]
    for outcome in rank_outcomes(never_comes_to_forward, 3, fault, timeout=25, group_timeout=4)[1:]:
        assert outcome.value.startswith(f"{kind}: rank {outcome.rank}: forward before backward pass 3, ")
        assert "broadcast of buffers (norm.running_mean, norm.running_var, " in outcome.value
        assert "rank 0" in outcome.value.split("because")[1]


def runs_out_of_data(rank, world):
    wrapper = DistributedDataParallel(Normalised())
    for step in range(3 if rank == 1 else 2):
        wrapper.zero_grad()
        message = caught(lambda step=step: wrapper(rank_input(rank, step)).square().sum().backward())
    if rank == 0:
        time.sleep(8)
    return message


def test_a_rank_that_runs_out_of_data_is_named_by_a_broadcast_in_forward():
    fine, message = run_ranks(runs_out_of_data, 2, timeout=30, group_timeout=3)
    assert fine == "fine"
    assert message.startswith("CollectiveTimeoutError: rank 1: forward before backward pass 3")
    assert "rank 0 did not come" in message and "out of data" in message


def a_parameter_on_one_rank_alone(rank, world):
    wrapper = DistributedDataParallel(Chain())
    for step in range(2):
        wrapper.zero_grad()
        wrapper(rank_input(rank, step)).square().sum().backward()
    if rank == 0:
        wrapper.module.adapter = nn.Linear(4, 4)
    return caught(lambda: wrapper(rank_input(rank)).square().sum().backward())


def test_ranks_that_wait_for_different_things_say_which():
    """The one compares models, the other averages: nobody is absent."""
    for rank, message in enumerate(
        run_ranks(a_parameter_on_one_rank_alone, 2, timeout=30, backend="gloo", group_timeout=3)
    ):
        what = ["comparison of parameters' names and shapes", "backward pass 3, all-reduce of bucket"]
        assert f"rank {rank}: " in message and what[rank] in message.split("because")[0], message
        assert what[1 - rank] in message.split("because")[1], message


def subgroup(rank, world, fault):
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    wrapper = DistributedDataParallel(Normalised(), process_group=groups[rank // 2])
    messages = [
        caught(lambda: DistributedDataParallel(nn.Linear(2, 2 + rank), process_group=groups[rank // 2]))
    ]
    for step in range(4):
        wrapper.zero_grad()
        if rank == 3 and step == 2:
            fault()
        messages.append(caught(lambda step=step: wrapper(rank_input(rank, step)).square().sum().backward()))
        if messages[-1] != "fine":
            break
    return messages


def test_messages_about_a_subgroup_name_ranks_of_the_whole_job():
    outcomes = rank_outcomes(subgroup, 4, killed, timeout=40)
    for outcome in outcomes[:3]:
        first = outcome.value[0]
        mine, other = outcome.rank, outcome.rank ^ 1
        assert f"rank {mine}: " in first and f"on rank {mine}" in first and f"on rank {other}" in first
    assert outcomes[0].value[1:] == outcomes[1].value[1:] == ["fine"] * 4
    message = outcomes[2].value[-1]
    assert message.startswith("PeerLostError: rank 2: forward before backward pass 3"), message
    assert "the process of rank 3 is gone" in message


class Picky(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, fails=False):
        if fails:
            raise ValueError("bad sample 4711")
        return self.b(checkpoint(self.a, x, use_reentrant=False))


def recovered(rank, world):
    wrapper = DistributedDataParallel(Picky())
    for step in range(4):
        wrapper.zero_grad()
        if step == 1:
            caught(lambda: wrapper(rank_input(rank), fails=True))
            continue
        if step == 3 and rank == 1:
            time.sleep(6)
            return "slept"
        message = caught(lambda step=step: wrapper(rank_input(rank, step)).square().sum().backward())
    return message


def checkpointed_whole(rank, world):
    wrapper = DistributedDataParallel(Picky())
    for step in range(3):
        wrapper.zero_grad()
        if step == 2 and rank == 1:
            time.sleep(6)
            return "slept"
        x = rank_input(rank, step).requires_grad_()
        loss = checkpoint(wrapper, x, use_reentrant=False).square().sum()
        message = caught(loss.backward)
    return message


@pytest.mark.parametrize("function", [recovered, checkpointed_whole])
def test_an_exception_that_training_went_on_after_is_no_cause_of_what_comes_later(function):
    message, _ = run_ranks(function, 2, timeout=30, group_timeout=3)
    assert message.startswith("CollectiveTimeoutError") and "rank 1 did not come" in message
    assert "had raised" not in message
