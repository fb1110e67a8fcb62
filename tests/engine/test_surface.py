"""What may be handed to a wrapper: outputs, hooks, sizes, modules, weights, meshes of many kinds.

Ranks are started once for the checks of one section; they are held against one process on the joined batch.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call, grad, vmap

from paceline.engine.comm_hooks import check_hook, name_of_hook
from paceline.engine.ddp import DistributedDataParallel
from paceline.engine.outputs import tensors_in
from paceline.engine.verify import verify_replicas
from paceline.errors import ArgumentError
from tests.engine.nets import Chain, assert_gradients, gradients, mean_gradients, rank_input
from tests.ranks import run_ranks

TINY_BUCKETS = 1e-6


def one_backward(net, rank, step=0):
    net(rank_input(rank, step)).square().sum().backward()


def expected(step=0, make=Chain):
    return mean_gradients(2, make, lambda net, rank: one_backward(net, rank, step))


def a_step_averages(wrapper, rank, step, want=None):
    wrapper.zero_grad()
    one_backward(wrapper, rank, step)
    assert_gradients(gradients(wrapper.module), want or expected(step))


# -- outputs --------------------------------------------------------------------------------


@dataclasses.dataclass
class Node:
    value: Any
    others: Any = None
    unset: Any = dataclasses.field(init=False)


def outputs_in_all_shapes():
    """Outputs with the tensors a, b in them, in this order."""
    a, b = torch.zeros(1), torch.ones(1)
    loop = Node(a)
    loop.others = [loop, {"b": b, "again": a}]
    parent, child = Node(a), Node(b)
    parent.others, child.others = child, parent
    endless: list[Any] = [a, b]
    endless.append(endless)
    chain: Any = b
    for _ in range(5000):
        chain = Node(None, chain)
    return a, b, [loop, parent, endless, Node(a, chain), (a, [b, "text", None]), {"x": Node(a), "y": (b,)}]


def test_tensors_are_found_in_outputs_that_refer_to_themselves():
    a, b, outputs = outputs_in_all_shapes()
    for output in outputs:
        found = tensors_in(output)
        assert len(found) == 2
        assert found[0] is a and found[1] is b
    many = {"ids": list(range(1000)), "of": {number: (number, b) for number in range(3)}, "first": [a, None]}
    assert {id(tensor) for tensor in tensors_in(many)} == {id(a), id(b)}
    assert tensors_in(Node) == tensors_in("text") == tensors_in(None) == []


class GivesNode(Chain):
    def forward(self, x):
        output = Node(super().forward(x))
        output.others = [output]
        return output


# -- hooks ----------------------------------------------------------------------------------


class CallableObject:
    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return default_hooks.allreduce_hook(state, bucket)


def with_text(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.allreduce_hook(state, bucket)


def for_type_checkers(
    state: Unknown,  # noqa: F821
    bucket: torch.distributed.GradBucket,
) -> Future[torch.Tensor]:  # noqa: F821
    return default_hooks.allreduce_hook(state, bucket)


def of_another_kind(state: Unknown, bucket: Tensor) -> Future[torch.Tensor]:  # noqa: F821
    raise AssertionError


def returning_another_kind(state: Unknown, bucket: dist.GradBucket) -> list[Tensor]:  # noqa: F821
    raise AssertionError


HOOKS = {
    "allreduce_hook": functools.partial(default_hooks.allreduce_hook),
    "CallableObject": CallableObject(),
    "CallableObject.__call__": CallableObject().__call__,
    "with_text": with_text,
    "for_type_checkers": functools.partial(functools.partial(for_type_checkers)),
}


def test_a_hook_with_other_annotations_is_refused_however_they_are_written():
    for hook, words in (
        (of_another_kind, "bucket annotation"),
        (returning_another_kind, "return annotation"),
    ):
        with pytest.raises(ValueError, match=words):
            check_hook(hook)
        with pytest.raises(ValueError, match=words):
            check_hook(functools.partial(hook))
    check_hook(max)  # written in C, without a signature


# -- another module -------------------------------------------------------------------------


class Scaled(Chain):
    def __init__(self, rank=0) -> None:
        torch.manual_seed(7 + rank)
        super().__init__()
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        self.register_buffer("scale", torch.full((4,), 2.0 + rank))

    def forward(self, x):
        return super().forward(x) * self.scale


def assigned_module(rank, world):
    wrapper = DistributedDataParallel(Chain(), bucket_cap_mb=TINY_BUCKETS)
    wrapper.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
    hooked: list[int] = []
    wrapper._register_buffer_comm_hook(hooked, lambda state, buffers: state.append(len(buffers)))
    for step in range(2):
        a_step_averages(wrapper, rank, step)
    older, learned = wrapper.module, wrapper.reducer
    wrapper.module = torch.compile(older, backend="eager")
    assert wrapper.reducer is learned
    wrapper.module = older
    assert wrapper.reducer is learned
    wrapper.verify_replicas()

    with wrapper.no_sync():
        wrapper.module = Scaled(rank)
        assert not wrapper.require_backward_grad_sync
    assert wrapper.require_backward_grad_sync
    wrapper.verify_replicas()
    assert float(wrapper.module.scale[0]) == 2.0
    want = expected(3, Scaled)
    a_step_averages(wrapper, rank, 3, want)
    wrapper.zero_grad()
    one_backward(wrapper.module, rank, 3)  # with forward bypassed
    assert_gradients(gradients(wrapper.module), want)
    assert wrapper.reducer.hook.function is default_hooks.allreduce_hook
    assert hooked[-1] == 1
    one_backward(older, rank)
    assert not torch.equal(*gathered(next(iter(gradients(older).values()))))  # not wrapped any more

    kept = wrapper.module
    with pytest.raises(ArgumentError, match=r"weight.*meta"):
        wrapper.module = nn.Linear(2, 2, device="meta")
    assert wrapper.module is kept
    with pytest.raises(TypeError):
        wrapper.module = "no module"
    a_step_averages(wrapper, rank, 3, want)


def gathered(tensor):
    results = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(results, tensor)
    return results


# -- weights lent for a call ----------------------------------------------------------------


def inner_steps(net, x):
    """Loss after one inner step of MAML (Finn et al., ICML 2017), differentiable in the net's parameters."""
    weights = dict(net.named_parameters())
    inner = functional_call(net, weights, (x,)).square().mean()
    slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    faster = {name: p - 0.1 * s for (name, p), s in zip(weights.items(), slopes, strict=True)}
    return functional_call(net, faster, (x + 1,)).square().mean()


def per_sample(net, x):
    weights = {name: p.detach() for name, p in net.named_parameters()}
    loss = grad(lambda weights, x: functional_call(net, weights, (x[None],)).square().mean())
    return vmap(loss, in_dims=(None, 0))(weights, x)


def lent_weights(rank, world):
    wrapper = DistributedDataParallel(Chain(), bucket_cap_mb=TINY_BUCKETS)
    for step in range(2):
        a_step_averages(wrapper, rank, step)
    order = wrapper.reducer.arrival_order
    x = rank_input(rank, 5)

    wrapper.zero_grad()
    inner_steps(wrapper, x).backward()
    want = mean_gradients(2, Chain, lambda net, rank: inner_steps(net, rank_input(rank, 5)).backward())
    assert_gradients(gradients(wrapper.module), want)

    if rank == 0:  # nothing of this communicates, so one rank may do it alone
        bare = copy.deepcopy(wrapper.module)
        for name, slopes in per_sample(wrapper, x).items():
            torch.testing.assert_close(slopes, per_sample(bare, x)[name.removeprefix("module.")])
        detached = {name: p.detach() for name, p in wrapper.named_parameters()}
        assert functional_call(wrapper, detached, (x,)).requires_grad is False
        doubled = {name: 2 * p for name, p in wrapper.named_parameters()}
        assert functional_call(wrapper, doubled, (x,)).requires_grad
    a_step_averages(wrapper, rank, 6)
    assert wrapper.reducer.arrival_order is not None and wrapper.reducer.arrival_order == order


# -- sizes and dtypes -----------------------------------------------------------------------


def sizes_and_dtypes(rank, world):
    for options in ({"bucket_cap_mb": 0}, {"bucket_cap_mb_list": [0, 0], "bucket_cap_mb": 0}):
        wrapper = DistributedDataParallel(Chain(), **options)
        for step in range(3):
            a_step_averages(wrapper, rank, step)
            assert all(len(bucket.slots) == 1 for bucket in wrapper.reducer.layout.buckets)
    for wrong in (-1, float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match="bucket_cap_mb"):
            DistributedDataParallel(Chain(), bucket_cap_mb=wrong)

    gradients_in_another_dtype(rank)

    wrapper = DistributedDataParallel(nn.Linear(4, 2))
    for _ in range(2):
        wrapper(rank_input(rank)).sum().backward()
    wrapper.zero_grad()
    with torch.no_grad():
        wrapper.module.weight.data = torch.ones(3, 4)
        wrapper.module.bias.data = torch.ones(3)
    wrapper(rank_input(rank)).sum().backward()
    want = sum(rank_input(other).sum(0) for other in range(world)) / world
    torch.testing.assert_close(wrapper.module.weight.grad, want.expand(3, 4))


def gradients_in_another_dtype(rank):
    """bfloat16 parameters whose gradients autograd accumulates in float32, and the other way round."""
    for own, other in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):

        def make(own=own, other=other):
            net = nn.Sequential(Chain(), nn.Linear(4, 4)).to(own)
            for parameter in net[0].parameters():
                parameter.grad_dtype = other
            return net

        def backward(net, rank, step=0, own=own):
            net(rank_input(rank, step).to(own)).square().sum().backward()

        wrapper = DistributedDataParallel(make())
        for step in range(3):
            wrapper.zero_grad()
            backward(wrapper, rank, step)
            found = gradients(wrapper.module)
            assert {gradient.dtype for name, gradient in found.items() if name[0] == "0"} == {other}
            want = mean_gradients(2, make, functools.partial(backward, step=step))
            for name, gradient in found.items():
                torch.testing.assert_close(gradient, want[name].to(gradient.dtype), rtol=2e-2, atol=2e-2)


# -- a wrapper inside -----------------------------------------------------------------------


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.inner(x))


def make_outer():
    torch.manual_seed(3)
    return Outer(Chain())


def wrapper_inside(rank, world):
    alone = [dist.new_group([other]) for other in range(world)]
    net = make_outer()
    net.inner = DistributedDataParallel(net.inner, process_group=alone[rank])
    first = next(name for name, _ in net.named_parameters())
    with pytest.raises(ArgumentError, match=rf"rank {rank}: {first} .*_ddp_params_and_buffers_to_ignore"):
        DistributedDataParallel(net)

    net._ddp_params_and_buffers_to_ignore = [n for n, _ in net.named_parameters() if n.startswith("inner.")]
    wrapper = DistributedDataParallel(net)
    local = make_outer()
    one_backward(local, rank)
    mean = mean_gradients(2, make_outer, one_backward)
    one_backward(wrapper, rank)
    assert_gradients(gradients(net.head), {n[5:]: g for n, g in mean.items() if n.startswith("head.")})
    assert_gradients(gradients(net.inner.module), gradients(local.inner))

    net = make_outer()
    same_ranks = dist.new_group(list(range(world)))
    net.inner = DistributedDataParallel(net.inner, process_group=same_ranks)
    one_backward(DistributedDataParallel(net), rank)  # retires the one inside
    assert_gradients(gradients(net.head), {n[5:]: g for n, g in mean.items() if n.startswith("head.")})

    net = make_outer()
    inner = DistributedDataParallel(net.inner, process_group=alone[rank])
    del inner
    gc.collect()
    wrapper = DistributedDataParallel(net)  # the other wrapper is gone
    one_backward(wrapper, rank)
    assert_gradients(gradients(net), mean)


def hooks_and_outputs(rank, world):
    for name, hook in HOOKS.items():
        wrapper = DistributedDataParallel(Chain(), bucket_cap_mb=TINY_BUCKETS)
        wrapper.register_comm_hook(None, hook)
        assert name_of_hook(hook) == name
        a_step_averages(wrapper, rank, 1)

    wrapper = DistributedDataParallel(GivesNode())
    wrapper(rank_input(rank)).value.square().sum().backward()
    assert_gradients(gradients(wrapper.module), expected())

    net = nn.Linear(2, 2)
    net.register_buffer("mask", torch.empty(2, device="meta"))
    with pytest.raises(ArgumentError, match=r"mask.*meta"):
        DistributedDataParallel(net)


CHECKS = (hooks_and_outputs, assigned_module, lent_weights, sizes_and_dtypes, wrapper_inside)


@pytest.mark.parametrize("check", CHECKS)
def test_what_is_handed_to_a_wrapper(check):
    run_ranks(check, 2, timeout=100)


def under_compiled_autograd(rank, world):
    from torch._dynamo import compiled_autograd

    wrapper = DistributedDataParallel(Chain())
    refused = pytest.raises(ArgumentError, match="compiled autograd cannot run the hooks")
    with compiled_autograd._enable(torch.compile(backend="eager")), refused:
        wrapper(rank_input(rank))
    a_step_averages(wrapper, rank, 0)


def test_compiled_autograd_is_refused():
    run_ranks(under_compiled_autograd, 2, timeout=100)


# -- options that differ between ranks ------------------------------------------------------

DIFFERING: dict[str, tuple[Any, Any]] = {
    "bucket_cap_mb": (TINY_BUCKETS, 25),
    "bucket_cap_mb_list": ([], [TINY_BUCKETS]),
    "find_unused_parameters": (True, False),
    "static_graph": (False, True),
    "forward_sync_buffers": (True, False),
    "verify_replicas_every": (0, 1),
}


class LeavesOneUnused(Chain):
    """With a buffer, and a layer that only some steps of rank 1 use."""

    def __init__(self):
        super().__init__()
        self.rare = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, rare=False):
        self.count += 1
        return super().forward(self.rare(x) if rare else x)


def options_that_differ(rank, world):
    for name, values in DIFFERING.items():
        for first in (0, 1):
            mine, rank_0s = values[rank ^ first], values[first]
            options = {"find_unused_parameters": True} | {name: mine}
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                wrapper = DistributedDataParallel(LeavesOneUnused(), **options)
            assert getattr(wrapper, name) == rank_0s
            assert (rank == 1) == any(name in str(warning.message) for warning in warned)
            rare = name not in ("static_graph", "find_unused_parameters")
            if name == "find_unused_parameters":
                wrapper.module.rare = nn.Identity()
            for step in range(4):
                wrapper.zero_grad()
                uses_rare = rare and rank == 1 and step % 2 == 1
                wrapper(rank_input(rank, step), uses_rare).square().sum().backward()
            assert_equal_on_ranks([p.grad for p in wrapper.parameters() if p.grad is not None])


def assert_equal_on_ranks(tensors):
    mine = torch.cat([tensor.flatten() for tensor in tensors])
    rank_0s = mine.clone()
    dist.broadcast(rank_0s, 0)
    assert torch.equal(mine, rank_0s)


def test_options_that_differ_between_ranks_are_those_of_rank_0_with_a_warning():
    run_ranks(options_that_differ, 2, timeout=100)


# -- tensor parallelism ---------------------------------------------------------------------


class Feed(nn.Module):
    """Two layers to shard and one to leave whole; with checkpointing, run once more in backward."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)
        self.reentrant = reentrant

    def block(self, x):
        return self.down(torch.relu(self.up(x)))

    def forward(self, x):
        if self.reentrant is None:
            return self.norm(x + self.block(x))
        x = x.requires_grad_()
        return self.norm(x + torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=self.reentrant))


def two_dimensions(rank, world):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    part, shard = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()

    def sharded(reentrant=None):
        return parallelize_module(
            Feed(reentrant), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )

    with pytest.raises(ArgumentError, match=r'up\.weight.*device_mesh=mesh\["dp"\]'):
        DistributedDataParallel(sharded(), process_group=mesh.get_group("dp"))
    for reentrant in (None, False, True):
        whole = Feed()
        wrapper = DistributedDataParallel(sharded(reentrant), device_mesh=mesh["dp"])
        names = [name for name, _ in whole.named_parameters()]
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9) for net in (whole, wrapper)]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (sum(whole(rank_input(other, step)).pow(3).sum() for other in range(2)) / 2).backward()
            wrapper(rank_input(part, step)).pow(3).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            assert [name for name, _ in wrapper.module.named_parameters()] == names
        with torch.no_grad():
            torch.testing.assert_close(wrapper(rank_input(0)), whole(rank_input(0)))
        found, want = wrapper.state_dict(), whole.state_dict()
        cuts = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
        for name in names:
            mine = want[name].chunk(2, cuts[name])[shard] if name in cuts else want[name]
            torch.testing.assert_close(found[name], mine)


def test_data_parallel_along_one_dimension_of_a_mesh_tensor_parallel_along_the_other():
    run_ranks(two_dimensions, 4, timeout=100)


def outside_of_the_group(rank, world):
    """What a rank is told that wraps or verifies over the others' process group."""
    group = dist.new_group([0])
    if rank == 0:
        return []
    uses = (
        lambda: DistributedDataParallel(Chain(), process_group=group),
        lambda: verify_replicas(Chain(), group),
    )
    told = []
    for use in uses:
        with pytest.raises(ArgumentError) as raised:
            use()
        told.append(str(raised.value))
    return told


def test_ranks_outside_of_a_process_group_are_told_so():
    _, told = run_ranks(outside_of_the_group, 2, timeout=60)
    assert told == ["rank 1 is not in this process group: only its members may use it"] * 2
