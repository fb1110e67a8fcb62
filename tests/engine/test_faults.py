"""When a rank fails, the others are told which one, and nobody waits for ever."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch import nn

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
