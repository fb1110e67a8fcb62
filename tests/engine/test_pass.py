"""How a pass runs: which buckets, in which order, when, and with how many collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from paceline.engine.ddp import DistributedDataParallel
from tests.engine.nets import Branches, Chain, rank_input
from tests.ranks import run_ranks

TINY_BUCKETS = 1e-6


class CountedCollectives:
    """Counts calls of torch.distributed's collectives while it is active."""

    NAMES = ("all_reduce", "broadcast", "all_gather", "all_gather_object", "barrier")

    def __enter__(self):
        self.calls = []
        self._kept = {name: getattr(dist, name) for name in self.NAMES}
        for name, function in self._kept.items():

            def counted(*args, _name=name, _function=function, **kwargs):
                self.calls.append(
                    (_name, args[0].numel() if args and isinstance(args[0], torch.Tensor) else None)
                )
                return _function(*args, **kwargs)

            setattr(dist, name, counted)
        return self

    def __exit__(self, *_):
        for name, function in self._kept.items():
            setattr(dist, name, function)


def train(wrapper, rank, steps=1, **kwargs):
    for step in range(steps):
        wrapper.zero_grad()
        wrapper(rank_input(rank, step), **kwargs).square().sum().backward()


def names(wrapper):
    return [[slot.name for slot in bucket.slots] for bucket in wrapper.reducer.layout.buckets]


# -- number of collectives ------------------------------------------------------------------


def collectives_of_a_step(rank, world):
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    wrapper = DistributedDataParallel(net, find_unused_parameters=True)
    train(wrapper, rank, 2)
    counts = {}
    with CountedCollectives() as counted:
        train(wrapper, rank)
    counts["training step"] = [name for name, _ in counted.calls]
    with CountedCollectives() as counted, wrapper.no_sync():
        train(wrapper, rank, 3)
    counts["three micro-batches under no_sync"] = [name for name, _ in counted.calls]
    with CountedCollectives() as counted, torch.no_grad():
        wrapper(rank_input(rank))
    counts["no_grad"] = [name for name, _ in counted.calls]
    wrapper.eval()
    with CountedCollectives() as counted:
        wrapper(rank_input(rank))
    counts["eval"] = [name for name, _ in counted.calls]
    return counts


def test_a_step_costs_one_all_reduce_a_bucket_and_nothing_else():
    for counts in run_ranks(collectives_of_a_step, 2, timeout=60):
        # one bucket; buffers of all dtypes (float statistics, integer counter) in one message, which goes at
        # the start of forward, where they may have been changed, and at the end of backward
        assert counts["training step"] == ["broadcast", "all_reduce", "broadcast"]
        # the buffers once, as a step came before
        assert counts["three micro-batches under no_sync"] == ["broadcast"]
        assert counts["no_grad"] == counts["eval"] == []


def bucket_sizes_on_the_wire(rank, world, cap):
    net = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(8)])  # 64 KiB each
    wrapper = DistributedDataParallel(net, bucket_cap_mb=cap)
    for _ in range(2):
        wrapper(torch.ones(1, 128)).sum().backward()
    with CountedCollectives() as counted:
        wrapper(torch.ones(1, 128)).sum().backward()
    return [numel // (128 * 128) for _, numel in counted.calls]


def test_the_bucket_cap_decides_how_much_travels_at_once():
    assert run_ranks(bucket_sizes_on_the_wire, 2, 0.125, timeout=60) == [[2, 2, 2, 2]] * 2
    assert run_ranks(bucket_sizes_on_the_wire, 2, 25, timeout=60) == [[8]] * 2


# -- overlap and order ----------------------------------------------------------------------


def what_was_computed_at_launch(rank, world):
    net = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(5)])
    wrapper = DistributedDataParallel(net, bucket_cap_mb=TINY_BUCKETS)
    train(wrapper, rank, 2)
    reached = []
    for name, parameter in net.named_parameters():
        parameter.register_hook(lambda _, name=name: reached.append(name))
    launches = []
    plain = dist.all_reduce

    def noting(tensor, *args, **kwargs):
        launches.append(len(reached))
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = noting
    train(wrapper, rank)
    dist.all_reduce = plain
    return launches


def test_buckets_are_launched_while_backward_goes_on():
    # Layer 4's gradient is there after one parameter, so bucket 0 leaves then, and so on. The last
    # one leaves when backward has ended.
    assert run_ranks(what_was_computed_at_launch, 2, timeout=60) == [[1, 2, 3, 4, 5]] * 2


class PairsInAnyOrder(nn.Module):
    """Pairs of layers, each pair a bucket, whose order within the pair may change from step to step."""

    BUCKET_OF_A_PAIR = 2 * 4 * 4 * 4 / 2**20

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.pairs = nn.ModuleList(
            nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2)) for _ in range(3)
        )

    def forward(self, x, swapped=False):
        for pair in self.pairs:
            for layer in reversed(pair) if swapped else pair:
                x = layer(x)
        return x


def what_had_arrived_at_launch(rank, world):
    net = PairsInAnyOrder()
    wrapper = DistributedDataParallel(net, bucket_cap_mb=PairsInAnyOrder.BUCKET_OF_A_PAIR)
    reached, launches = [], []
    for parameter in net.parameters():
        parameter.register_hook(lambda _: reached.append(1))
    train(wrapper, rank, 2)
    plain = dist.all_reduce

    def noting(tensor, *args, **kwargs):
        launches[-1].append(len(reached))
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = noting
    for swapped in (False, True, True, False, False):
        reached.clear()
        launches.append([])
        train(wrapper, rank, swapped=swapped)
    dist.all_reduce = plain
    return launches


def test_a_bucket_is_launched_with_its_last_gradient_whichever_that_is():
    for before, _, swapped, _, again in run_ranks(what_had_arrived_at_launch, 2, timeout=60):
        assert before == swapped == again == [2, 4, 6]


def averaged_without_the_wrappers_forward(rank, world):
    net = PairsInAnyOrder()
    wrapper = DistributedDataParallel(net, find_unused_parameters=True)
    train(wrapper, rank, 3)
    layers = [layer for pair in net.pairs for layer in pair]
    found = []
    for layer in layers:
        wrapper.zero_grad()
        layer(rank_input(rank)).sum().backward()
        found.append([p.grad for p in net.parameters()])
        found[-1] = [None if gradient is None else gradient.clone() for gradient in found[-1]]
    return found


def test_any_single_gradient_is_averaged_however_its_backward_began():
    wanted = torch.stack([rank_input(rank).sum(0).expand(4, 4) for rank in range(2)]).mean(0)
    for found in run_ranks(averaged_without_the_wrappers_forward, 2, timeout=60):
        for used, gradients in enumerate(found):
            for index, gradient in enumerate(gradients):
                if index == used:
                    torch.testing.assert_close(gradient, wanted)
                else:
                    assert gradient is None


class OutOfOrder(nn.Module):
    """Registers its layers in another order than it uses them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.second, self.third, self.first = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x):
        return self.third(self.second(self.first(x)))


def plan_before_and_after(rank, world):
    wrapper = DistributedDataParallel(OutOfOrder(), bucket_cap_mb=TINY_BUCKETS)
    before = names(wrapper)
    train(wrapper, rank, 2)
    return before, names(wrapper)


def test_buckets_follow_the_order_of_arrival_after_the_first_pass():
    for before, after in run_ranks(plan_before_and_after, 2, timeout=60):
        assert before == [["first.weight"], ["third.weight"], ["second.weight"]]  # reverse registration
        assert after == [["third.weight"], ["second.weight"], ["first.weight"]]  # as backward goes


class OrderByRank(nn.Module):
    """Adds two independent layers, in an order that differs between ranks."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(0)
        self.rank, self.x, self.y = rank, nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        first, second = (self.x, self.y) if self.rank == 0 else (self.y, self.x)
        return first(x).sin() + second(x).cos()


def plans_of_ranks_that_differ(rank, world):
    wrapper = DistributedDataParallel(OrderByRank(rank), bucket_cap_mb=TINY_BUCKETS)
    train(wrapper, rank, 3)
    return names(wrapper), [p.grad.clone() for p in wrapper.parameters()]


def test_all_ranks_take_rank_0s_order():
    (plan, grads), (other_plan, other_grads) = run_ranks(plans_of_ranks_that_differ, 2, timeout=60)
    assert plan == other_plan
    assert all(map(torch.equal, grads, other_grads))


def plan_with_unused(rank, world):
    wrapper = DistributedDataParallel(Branches(), find_unused_parameters=True, bucket_cap_mb=TINY_BUCKETS)
    train(wrapper, rank, 3, use=(1, 2))
    return names(wrapper)


def test_parameters_that_were_unused_move_to_trailing_buckets():
    for plan in run_ranks(plan_with_unused, 2, timeout=60):
        assert plan[-1] == ["branches.0.weight"]


# -- static graph ---------------------------------------------------------------------------


def static_graph_that_changes(rank, world, first, then):
    wrapper = DistributedDataParallel(Branches(), static_graph=True)
    train(wrapper, rank, 1, use=first)
    try:
        train(wrapper, rank, 1, use=then)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_static_graph_that_changes_is_an_error_that_names_the_parameter():
    for message in run_ranks(static_graph_that_changes, 2, (0, 1), (0, 1, 2), timeout=60):
        assert message.startswith("GraphChangedError") and "branches.2.weight" in message
    for message in run_ranks(static_graph_that_changes, 2, (0, 1), (0,), timeout=60):
        assert message.startswith("GraphChangedError") and "branches.1.weight" in message
    assert run_ranks(static_graph_that_changes, 2, (0,), (0,), timeout=60) == ["no error"] * 2


# -- hooks of users ---------------------------------------------------------------------------


def users_hooks(rank, world, before_wrapping):
    net = Chain()
    seen = []

    def clamp(parameter):
        seen.append(parameter.grad is not None)
        parameter.grad.clamp_(-0.01, 0.01)

    def register():
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(clamp)

    if before_wrapping:
        register()
    wrapper = DistributedDataParallel(net, bucket_cap_mb=TINY_BUCKETS)
    if not before_wrapping:
        register()
    train(wrapper, rank, 2)
    return all(seen), len(seen), max(float(p.grad.abs().max()) for p in net.parameters())


def test_users_hooks_see_and_change_the_local_gradient():
    for before_wrapping in (True, False):
        for saw_all, count, largest in run_ranks(users_hooks, 2, before_wrapping, timeout=60):
            assert saw_all and count == 12
            assert largest <= 0.01 + 1e-9


def communication_hook(rank, world):
    net = Chain()
    wrapper = DistributedDataParallel(net, bucket_cap_mb=TINY_BUCKETS)
    facts = []

    def double(state, bucket):
        shapes = [tuple(g.shape) for g in bucket.gradients()]
        assert shapes == [tuple(p.shape) for p in bucket.parameters()]
        facts.append((state, bucket.index(), bucket.is_last(), bucket.buffer().numel()))
        work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return work.then(lambda future: 2 * future.value()[0])

    wrapper.register_comm_hook("state", double)
    train(wrapper, rank)
    return facts, {n: p.grad.clone() for n, p in net.named_parameters()}


def test_a_communication_hook_gets_undivided_gradients_and_decides_the_result():
    sums: dict[str, torch.Tensor] = {}
    for rank in range(2):
        net = Chain()
        net(rank_input(rank)).square().sum().backward()
        for name, parameter in net.named_parameters():
            sums[name] = sums.get(name, 0) + parameter.grad
    for facts, found in run_ranks(communication_hook, 2, timeout=60):
        assert [index for _, index, _, _ in facts] == list(range(6))
        assert [is_last for _, _, is_last, _ in facts] == [False] * 5 + [True]
        assert {state for state, *_ in facts} == {"state"} and {numel for *_, numel in facts} == {4, 16}
        for name, total in sums.items():
            torch.testing.assert_close(found[name], 2 * total)
