"""What surrounds the gradients: buffers, state, copies, uneven inputs, options of the constructor."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from paceline.engine.ddp import DistributedDataParallel
from paceline.errors import ArgumentError
from tests.engine.nets import Branches, Chain, assert_gradients, gradients, mean_gradients, rank_input
from tests.ranks import run_ranks

TINY_BUCKETS = 1e-6


def one_backward(net, rank, step=0):
    net(rank_input(rank, step)).square().sum().backward()


class WithBuffers(Chain):
    """A buffer that takes part in the product, one that does not train, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x):
        return self.norm(super().forward(x)) * self.scale


# -- buffers --------------------------------------------------------------------------------


def buffers_after_forward(rank, world, **options):
    torch.manual_seed(rank)
    net = WithBuffers()
    net.scale.fill_(float(rank + 5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        wrapper = DistributedDataParallel(net, **options)
    built = float(net.scale[0])
    for step in range(2):
        one_backward(wrapper, rank, step)
    with torch.no_grad():
        net.scale.fill_(float(rank + 7))
    wrapper(rank_input(rank))
    return built, float(net.scale[0]), net.norm.running_mean.clone()


def default_buffers(rank, world):
    return buffers_after_forward(rank, world)


def buffers_left_alone(rank, world):
    return buffers_after_forward(rank, world, broadcast_buffers=False)


def test_buffers_follow_rank_0_at_construction_and_in_training_forwards():
    (built_0, later_0, _), (built_1, later_1, _) = run_ranks(default_buffers, 2, timeout=60)
    assert built_0 == built_1 == 5.0
    assert later_0 == later_1 == 7.0


def test_without_broadcast_buffers_only_construction_makes_them_equal():
    (built_0, later_0, mean_0), (built_1, later_1, mean_1) = run_ranks(buffers_left_alone, 2, timeout=60)
    assert built_0 == built_1 == 5.0
    assert (later_0, later_1) == (7.0, 8.0)
    assert not torch.equal(mean_0, mean_1)


def buffers_under_living_graphs(rank, world):
    net = WithBuffers()
    wrapper = DistributedDataParallel(net)
    with wrapper.no_sync():
        one_backward(wrapper, rank)  # takes the turn of the first broadcast
    net.scale.fill_(2.0 + rank)
    living = wrapper(rank_input(rank)).square().sum()  # saves this rank's own scale
    one_backward(net, rank)  # synchronises, so that the next forward broadcasts
    wrapper(rank_input(rank))
    wrapper.zero_grad()
    living.backward()
    return gradients(net), float(net.scale[0])


def test_a_buffer_that_a_living_graph_has_saved_is_replaced_and_not_written():
    def run(net, rank):
        net.scale.fill_(2.0 + rank)
        one_backward(net, rank)

    wanted = mean_gradients(2, WithBuffers, run)
    for found, scale in run_ranks(buffers_under_living_graphs, 2, timeout=60):
        assert scale == 2.0
        assert_gradients(found, wanted)


def hooked_buffers(rank, world, after):
    net = WithBuffers()
    wrapper = DistributedDataParallel(net)
    seen = []

    def average(state, buffers):
        seen.append((state, sorted(buffers)))
        return [dist.all_reduce(buffers["scale"], async_op=True).get_future()]

    wrapper.buffer_sync.set_hook("state", average, after_forward=after)
    net.scale.fill_(rank + 1.0)
    one_backward(wrapper, rank)
    return seen, float(net.scale[0])


@pytest.mark.parametrize("after", [True, False])
def test_a_buffer_hook_takes_the_place_of_the_broadcast(after):
    for seen, scale in run_ranks(hooked_buffers, 2, after, timeout=60):
        names = ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var", "scale"]
        assert seen == [("state", names)]
        assert scale == 3.0


# -- state ----------------------------------------------------------------------------------


def state_in_all_spellings(rank, world):
    plain = WithBuffers()
    wrapper = DistributedDataParallel(copy.deepcopy(plain))
    compiled = DistributedDataParallel(torch.compile(copy.deepcopy(plain), backend="aot_eager"))
    wanted = {name: torch.full_like(value, 3) for name, value in plain.state_dict().items()}
    outcomes = []
    for loaded in (wrapper, compiled):
        for spelling in ("", "module.", "_orig_mod.", "module._orig_mod."):
            loaded.load_state_dict({spelling + name: value for name, value in wanted.items()})
            state = loaded.state_dict()
            same_values = all(map(torch.equal, state.values(), wanted.values()))
            outcomes.append(list(state) == list(wanted) and same_values)
    plain.load_state_dict(wrapper.state_dict())
    holder = nn.ModuleDict({"inner": wrapper})
    keys = list(holder.state_dict())
    holder.load_state_dict(holder.state_dict())
    with pytest.raises(RuntimeError, match="nonsense"):
        wrapper.load_state_dict({**wanted, "nonsense": torch.ones(1)})
    return outcomes, keys == [f"inner.{name}" for name in wanted]


def test_state_keys_do_not_depend_on_wrapping_or_compiling_and_all_spellings_load():
    for outcomes, nested in run_ranks(state_in_all_spellings, 2, timeout=90):
        assert outcomes == [True] * 8 and nested


def zero_redundancy(rank, world):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = Chain()
    wrapper = DistributedDataParallel(net)
    optimizer = ZeroRedundancyOptimizer(wrapper.parameters(), torch.optim.SGD, lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        one_backward(wrapper, rank, step)
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def test_torchs_zero_redundancy_optimizer():
    net = Chain()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        (sum(net(rank_input(rank, step)).square().sum() for rank in range(2)) / 2).backward()
        optimizer.step()
    for weights in run_ranks(zero_redundancy, 2, timeout=60):
        for have, want in zip(weights, net.parameters(), strict=True):
            torch.testing.assert_close(have, want.detach())


def pickled_and_copied(rank, world):
    wrapper = DistributedDataParallel(Chain(), find_unused_parameters=True, bucket_cap_mb=TINY_BUCKETS)
    one_backward(wrapper, rank)
    file = io.BytesIO()
    torch.save(wrapper, file)
    file.seek(0)
    found = []
    for again in (torch.load(file, weights_only=False), copy.deepcopy(wrapper)):
        again.zero_grad()
        one_backward(again, rank)
        found.append((again.find_unused_parameters, again.bucket_cap_mb, gradients(again.module)))
    subgroup = dist.new_group([0, 1])
    with pytest.raises(RuntimeError, match="default process group"):
        torch.save(DistributedDataParallel(Chain(), process_group=subgroup), io.BytesIO())
    return found


def test_a_pickled_or_copied_wrapper_goes_on_averaging():
    wanted = mean_gradients(2, Chain, one_backward)
    for found in run_ranks(pickled_and_copied, 2, timeout=60):
        for find_unused, cap, grads in found:
            assert find_unused and cap == TINY_BUCKETS
            assert_gradients(grads, wanted)


# -- uneven inputs --------------------------------------------------------------------------


def uneven(rank, world, by_initial):
    net = Chain()
    wrapper = DistributedDataParallel(net, bucket_cap_mb=TINY_BUCKETS)
    found = []
    with wrapper.join(divide_by_initial_world_size=by_initial):
        for step in range(4 - rank):
            wrapper.zero_grad()
            one_backward(wrapper, rank, step)
            found.append(gradients(net))
    wrapper.zero_grad()
    one_backward(wrapper, rank)  # all are in step again
    return found, gradients(net)


@pytest.mark.parametrize("by_initial", [True, False])
def test_join_counts_ranks_without_data_as_zero_or_not_at_all(by_initial):
    outcomes = run_ranks(uneven, 3, by_initial, timeout=60)
    after = mean_gradients(3, Chain, one_backward)
    for found, later in outcomes:
        assert_gradients(later, after)
        for step, grads in enumerate(found):
            active = [other for other in range(3) if step < 4 - other]
            wanted = {}
            for name in grads:
                parts = []
                for other in active:
                    net = Chain()
                    one_backward(net, other, step)
                    parts.append(dict(net.named_parameters())[name].grad)
                wanted[name] = sum(parts) / (3 if by_initial else len(active))
            assert_gradients(grads, wanted)


def joined_with_an_optimizer(rank, world):
    from torch.distributed.algorithms import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = Chain()
    wrapper = DistributedDataParallel(net)
    optimizer = ZeroRedundancyOptimizer(wrapper.parameters(), torch.optim.SGD, lr=0.1)
    with Join([wrapper, optimizer]):
        for step in range(4 - 2 * rank):
            optimizer.zero_grad()
            one_backward(wrapper, rank, step)
            optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def test_a_wrapper_and_a_sharded_optimizer_joined_together():
    net = Chain()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        with_data = [rank for rank in range(2) if step < 4 - 2 * rank]
        (sum(net(rank_input(rank, step)).square().sum() for rank in with_data) / 2).backward()
        optimizer.step()
    for weights in run_ranks(joined_with_an_optimizer, 2, timeout=60):
        for have, want in zip(weights, net.parameters(), strict=True):
            torch.testing.assert_close(have, want.detach())


# -- options --------------------------------------------------------------------------------


def trained_in_half(rank, world):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter)

    class Config:
        param_dtype, reduce_dtype, buffer_dtype = torch.bfloat16, torch.bfloat16, None

    seen = []
    net[0].register_forward_hook(lambda m, args, out: seen.append((m.weight.dtype, args[0].dtype)))
    wrapper = DistributedDataParallel(net, mixed_precision=Config)
    with wrapper.no_sync():
        one_backward(wrapper, rank)
    one_backward(wrapper, rank, step=1)
    dtypes = {p.dtype for p in net.parameters()} | {p.grad.dtype for p in net.parameters()}
    with torch.no_grad():
        wrapper(rank_input(rank))
    return set(seen), dtypes | {p.dtype for p in net.parameters()}, gradients(net)


def test_mixed_precision_computes_low_and_keeps_parameters_and_gradients_in_full():
    def build():
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        torch.manual_seed(0)
        for parameter in net.parameters():
            nn.init.normal_(parameter)
        return net

    def two_micro_batches(net, rank):
        one_backward(net, rank, 0)
        one_backward(net, rank, 1)

    wanted = mean_gradients(2, build, two_micro_batches)
    for seen, dtypes, found in run_ranks(trained_in_half, 2, timeout=60):
        assert seen == {(torch.bfloat16, torch.bfloat16)} and dtypes == {torch.float32}
        for name, want in wanted.items():
            torch.testing.assert_close(found[name], want, rtol=0.05, atol=0.05 * float(want.abs().max()))


def optimizers_in_backward(rank, world, before):
    from torch.distributed.optim import _apply_optimizer_in_backward

    net = Chain()
    if before:
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    wrapper = DistributedDataParallel(net, bucket_cap_mb=TINY_BUCKETS)
    if not before:
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    for step in range(3):
        one_backward(wrapper, rank, step)
    return [p.detach().clone() for p in net.parameters()], all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("before", [True, False])
def test_optimizers_in_backward_step_with_the_average(before):
    net = Chain()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        (sum(net(rank_input(rank, step)).square().sum() for rank in range(2)) / 2).backward()
        optimizer.step()
    for weights, cleared in run_ranks(optimizers_in_backward, 2, before, timeout=60):
        assert cleared
        for have, want in zip(weights, net.parameters(), strict=True):
            torch.testing.assert_close(have, want.detach())


def unused_skipped(rank, world):
    net = Branches()
    wrapper = DistributedDataParallel(
        net, find_unused_parameters=True, skip_all_reduce_unused_params=True, bucket_cap_mb=TINY_BUCKETS
    )
    reduced, found = [], []
    for step in range(4):
        wrapper.zero_grad()
        use = (0,) if step < 3 else (0, 1) if rank == 0 else (0,)
        wrapper(rank_input(rank, step), use).square().sum().backward()
        reduced.append(wrapper.reducer.statistics.buckets_reduced)
        found.append(gradients(net))
    return reduced, found


def test_buckets_that_no_rank_needs_are_skipped():
    outcomes = run_ranks(unused_skipped, 2, timeout=60)
    for step in range(4):

        def run(net, rank, step=step):
            use = (0,) if step < 3 else (0, 1) if rank == 0 else (0,)
            net(rank_input(rank, step), use).square().sum().backward()

        wanted = mean_gradients(2, Branches, run)
        for reduced, found in outcomes:
            assert reduced == [5, 3, 3, 4]  # all at first, then without branches 1 and 2, then with 1
            assert_gradients(found[step], wanted)


def delayed_parameters(rank, world):
    net = Chain()
    wrapper = DistributedDataParallel(
        net,
        delay_all_reduce_named_params=[("c.weight", net.c.weight)],
        param_to_hook_all_reduce=net.a.weight,
        bucket_cap_mb=TINY_BUCKETS,
    )
    for _ in range(2):
        wrapper.zero_grad()
        one_backward(wrapper, rank)
    return wrapper.reducer.layout.buckets[-1].slots[0].name, gradients(net)


def test_delayed_parameters_travel_last():
    wanted = mean_gradients(2, Chain, one_backward)
    for last, found in run_ranks(delayed_parameters, 2, timeout=60):
        assert last == "c.weight"
        assert_gradients(found, wanted)


def ignored_parameters(rank, world):
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.weight"])
    wrapper = DistributedDataParallel(net)
    one_backward(wrapper, rank)
    return [p.detach().clone() for p in net.parameters()], gradients(net)


def test_ignored_parameters_are_left_alone():
    (mine, grads), (theirs, other_grads) = run_ranks(ignored_parameters, 2, timeout=60)
    assert [torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)] == [False, True, True, True]
    assert not torch.equal(grads["0.weight"], other_grads["0.weight"])
    assert torch.equal(grads["1.weight"], other_grads["1.weight"])


def replicas_that_drift(rank, world):
    net = Chain()
    wrapper = DistributedDataParallel(net, verify_replicas_every=2)
    messages = []
    for step in range(6):
        if step == 3 and rank == 1:
            net.b.weight.data[0, 0] += 0.25
        try:
            one_backward(wrapper, rank, step)
            messages.append("fine")
        except RuntimeError as error:
            messages.append(f"{type(error).__name__}: {error}")
    try:
        wrapper.verify_replicas()
    except RuntimeError as error:
        messages.append(str(error))
    return messages


def test_verify_replicas_every_so_many_steps():
    for messages in run_ranks(replicas_that_drift, 2, timeout=60):
        assert messages[:4] == ["fine"] * 4  # the drift of step 3 is looked for after pass 4
        assert messages[4].startswith("ReplicaMismatchError") and "b.weight" in messages[4]
        assert "0.25" in messages[4] and "b.weight" in messages[-1]


def groups(rank, world):
    subgroup = dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (world,))
    found = []
    for options in ({"process_group": subgroup}, {"device_mesh": mesh}):
        net = Chain()
        wrapper = DistributedDataParallel(net, **options)
        one_backward(wrapper, rank)
        found.append(gradients(net))
    errors = []
    square = init_device_mesh("cpu", (1, 2))
    for options in ({"process_group": subgroup, "device_mesh": mesh}, {"device_mesh": square}):
        try:
            DistributedDataParallel(Chain(), **options)
        except RuntimeError as error:
            errors.append(str(error))
    return found, errors


def test_process_group_and_device_mesh():
    wanted = mean_gradients(2, Chain, one_backward)
    for found, errors in run_ranks(groups, 2, timeout=60):
        for grads in found:
            assert_gradients(grads, wanted)
        assert "both process_group and device_mesh" in errors[0] and "Only 1D device mesh" in errors[1]


def bad_arguments(rank, world):
    errors = {}

    def attempt(name, build):
        try:
            build()
        except (ArgumentError, RuntimeError, TypeError, ValueError) as error:
            errors[name] = f"{type(error).__name__}: {error}"

    net = Chain()
    attempt("device_ids", lambda: DistributedDataParallel(net, device_ids=[0]))
    attempt("output_device", lambda: DistributedDataParallel(net, output_device=0))
    attempt("cap", lambda: DistributedDataParallel(net, bucket_cap_mb=-1))
    attempt("lazy", lambda: DistributedDataParallel(nn.LazyLinear(3)))
    attempt("delayed", lambda: DistributedDataParallel(net, delay_all_reduce_named_params=[]))
    attempt("hook", lambda: DistributedDataParallel(net).register_comm_hook(None, "no function"))
    wrapper = DistributedDataParallel(net)
    wrapper.register_comm_hook(None, lambda state, bucket: None)
    attempt("hook twice", lambda: wrapper.register_comm_hook(None, lambda state, bucket: None))
    return errors


def test_arguments_that_cannot_work_raise_at_once_and_say_why():
    for errors in run_ranks(bad_arguments, 1, timeout=60):
        assert "device_ids" in errors["device_ids"] and "leave them out" in errors["device_ids"]
        assert "output_device" in errors["output_device"]
        assert "bucket_cap_mb must be a number of MiB" in errors["cap"]
        assert "weight has no shape yet" in errors["lazy"]
        assert "at the same time" in errors["delayed"]
        assert "callable" in errors["hook"]
        assert "only once" in errors["hook twice"]


def test_without_a_process_group_the_error_says_what_to_do():
    with pytest.raises(ArgumentError, match=r"init_process_group\(\).*paceline launch"):
        DistributedDataParallel(nn.Linear(2, 2))


def passed_through(rank, world):
    torch.manual_seed(rank)
    net = nn.Linear(4, 4).requires_grad_(False)
    wrapper = DistributedDataParallel(net)
    out = wrapper(rank_input(rank))
    return torch.equal(out, net(rank_input(rank))), net.weight.clone()


def test_a_module_without_trainable_parameters_is_passed_through():
    (same_0, weight_0), (same_1, weight_1) = run_ranks(passed_through, 2, timeout=60)
    assert same_0 and same_1 and torch.equal(weight_0, weight_1)


def dropped(rank, world):
    import gc
    import weakref

    net = Chain()
    wrapper = DistributedDataParallel(net)
    one_backward(wrapper, rank)
    reducer = weakref.ref(wrapper.reducer)
    del wrapper
    gc.collect()
    net.zero_grad()
    one_backward(net, rank)
    return reducer() is None, [p._post_accumulate_grad_hooks for p in net.parameters()], gradients(net)


def test_a_dropped_wrapper_leaves_nothing_on_the_module():
    for rank, (gone, hooks, found) in enumerate(run_ranks(dropped, 2, timeout=60)):
        assert gone and not any(hooks)
        net = Chain()
        one_backward(net, rank)
        assert_gradients(found, gradients(net))


def wrapped_again(rank, world):
    net = Chain()
    older = DistributedDataParallel(net, bucket_cap_mb=TINY_BUCKETS)
    one_backward(older, rank)
    newer = DistributedDataParallel(net)
    net.zero_grad()
    one_backward(newer, rank)
    counts = older.reducer.passes_finished, newer.reducer.passes_finished
    for _ in range(2):  # a wrapper around a wrapper, and the inner one called by itself
        outer = DistributedDataParallel(newer)
        for called in (newer, outer):
            net.zero_grad()
            one_backward(called, rank)
    return *counts, gradients(net)


def test_wrapping_a_module_again_retires_the_older_wrapper():
    wanted = mean_gradients(2, Chain, one_backward)
    for older, newer, found in run_ranks(wrapped_again, 2, timeout=60):
        assert (older, newer) == (1, 1)
        assert_gradients(found, wanted)


def wrapped_as_a_part(rank, world):
    """Passes of each wrapper after a step through the older one, whose module is part of the newer one's."""
    part = Chain()
    older = DistributedDataParallel(part)
    newer = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), part), find_unused_parameters=True)
    for wrapper in (newer, newer, older):
        wrapper.zero_grad()
        one_backward(wrapper, rank)
    return older.reducer.passes_finished, newer.reducer.passes_finished, gradients(part)


def test_wrapping_a_part_and_then_the_whole_retires_the_part():
    wanted = mean_gradients(2, Chain, one_backward)
    for older, newer, found in run_ranks(wrapped_as_a_part, 2, timeout=60):
        assert (older, newer) == (0, 3)
        assert_gradients(found, wanted)


def frozen_between_forward_and_backward(rank, world):
    net = Chain()
    wrapper = DistributedDataParallel(net, find_unused_parameters=True)
    loss = wrapper(rank_input(rank)).square().sum()
    net.a.requires_grad_(False)
    loss.backward()
    return gradients(net)


def test_freezing_between_forward_and_backward():
    wanted = mean_gradients(2, Chain, one_backward)
    for found in run_ranks(frozen_between_forward_and_backward, 2, timeout=60):
        assert found["c.weight"] is not None
        torch.testing.assert_close(found["c.weight"], wanted["c.weight"])
