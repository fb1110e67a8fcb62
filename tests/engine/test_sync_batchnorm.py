"""SyncBatchNorm on ranks with parts of a batch equals BatchNorm in one process on the joined batch."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.engine.ddp import DistributedDataParallel
from paceline.engine.statistics_exchange import StatisticsExchange
from paceline.engine.sync_batchnorm import SyncBatchNorm
from tests.engine.nets import FailsInBackward
from tests.engine.test_pass import CountedCollectives
from tests.ranks import rank_outcomes, run_ranks

TINY_BUCKETS = 1e-6
BATCH_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def batch(rows, *shape, seed=0, dtype=torch.float32):
    """A joined batch with another scale and offset in every channel."""
    x = torch.randn(rows, *shape, generator=torch.Generator().manual_seed(seed))
    per_channel = torch.arange(1.0, shape[0] + 1).view(1, -1, *[1] * (len(shape) - 1))
    return (x * per_channel + 2 * per_channel).to(dtype)


def part_of(joined, rank, sizes):
    begin = sum(sizes[:rank])
    return joined[begin : begin + sizes[rank]]


def loss_of(y, seed=0):
    """A sum over elements that is not symmetric in them; parts of a batch need parts of ``weights_for``."""
    return (y.float() * weights_for(y.shape, seed)).sum() + y.float().pow(3).sum()


def weights_for(shape, seed=0):
    return torch.randn(shape[1:], generator=torch.Generator().manual_seed(seed + 50))


def state(module):
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def grads(module):
    return {name: p.grad.detach().clone() for name, p in module.named_parameters()}


def assert_all_close(found, wanted, **tolerance):
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(
            found[name], wanted[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


def assert_same_bits(states):
    for other in states[1:]:
        for name, tensor in states[0].items():
            assert torch.equal(tensor, other[name]), name


# -- against one process -----------------------------------------------------------------------


def layer_for(shape, options):
    torch.manual_seed(1)
    layer = BATCH_NORMS[len(shape) + 1](shape[0], **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.5, 1.5)
    return layer


def three_steps(module, inputs, scale=1.0):
    """Outputs and input gradients of each step; gradients of parameters add up."""
    seen = []
    for x in inputs:
        x = x.clone().requires_grad_()
        y = module(x)
        (loss_of(y) * scale).backward()
        seen.append((y.detach(), x.grad))
    return seen


def layer_on_a_rank(rank, world, cases):
    found = []
    for shape, sizes, options in cases:
        layer = SyncBatchNorm.convert_sync_batchnorm(layer_for(shape, options))
        module = DistributedDataParallel(layer) if list(layer.parameters()) else layer
        inputs = [part_of(batch(sum(sizes), *shape, seed=seed), rank, sizes) for seed in range(3)]
        seen = three_steps(module, inputs, scale=world)
        found.append((seen, grads(layer), state(layer)))
    return found


SHAPES = [(3,), (3, 5), (3, 4, 2), (2, 3, 2, 2)]
OPTIONS = [
    {},
    {"affine": False},
    {"momentum": None},
    {"track_running_stats": False},
    {"bias": False, "eps": 0.1, "momentum": 0.7},
]


@pytest.mark.parametrize("sizes", [(3, 3), (4, 1), (1, 1), (3, 0), (0, 4, 2)], ids=str)
def test_a_layer_equals_batchnorm_on_the_joined_batch(sizes):
    cases = [(shape, sizes, options) for shape, options in itertools.product(SHAPES, OPTIONS)]
    results = run_ranks(layer_on_a_rank, len(sizes), cases, timeout=90)
    for number, (shape, _, options) in enumerate(cases):
        per_rank = [result[number] for result in results]
        layer = layer_for(shape, options)
        wanted = three_steps(layer, [batch(sum(sizes), *shape, seed=seed) for seed in range(3)])
        for step, (y, dx) in enumerate(wanted):
            found_y = torch.cat([seen[step][0] for seen, _, _ in per_rank])
            found_dx = torch.cat([seen[step][1] for seen, _, _ in per_rank])
            torch.testing.assert_close(found_y, y, rtol=1e-4, atol=1e-5)
            # every rank's loss was scaled by the number of ranks, for the wrapper's average
            torch.testing.assert_close(found_dx / len(sizes), dx, rtol=1e-3, atol=2e-4)
        for _, found_grads, found_state in per_rank:
            assert_all_close(found_grads, grads(layer), rtol=1e-3, atol=1e-3)
            assert_all_close(found_state, state(layer))
        assert_same_bits([found_grads | found_state for _, found_grads, found_state in per_rank])


class Net(nn.Module):
    """Normalised layers between others, with parameters before and behind each."""

    def __init__(self, affine=True):
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4, affine=affine),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.BatchNorm2d(4, affine=affine),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 9, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

    def forward(self, x):
        return self.head(self.features(x))


def train_steps(module, inputs, scale):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.5)
    for x, rows in inputs:
        optimizer.zero_grad()
        (module(x).square().sum() * (scale / rows)).backward()
        optimizer.step()


def net_on_a_rank(rank, world, sizes, affine, pickled, cap):
    net = SyncBatchNorm.convert_sync_batchnorm(Net(affine))
    wrapper = DistributedDataParallel(net, bucket_cap_mb=cap)
    if pickled:
        file = io.BytesIO()
        torch.save(wrapper, file)
        wrapper = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    rows = sum(sizes)
    inputs = [(part_of(batch(rows, 2, 3, 3, seed=seed), rank, sizes), rows) for seed in range(5)]
    train_steps(wrapper, inputs, scale=world)
    return state(wrapper.module)


@pytest.mark.parametrize(
    ("sizes", "affine", "pickled", "cap"),
    [
        ((2, 2), True, True, None),
        ((2, 2), False, False, TINY_BUCKETS),
        ((2, 3), True, False, TINY_BUCKETS),
        ((5, 0), True, False, TINY_BUCKETS),
        ((2, 3, 4), True, False, None),
    ],
)
def test_a_net_trains_as_one_process_on_the_joined_batch(sizes, affine, pickled, cap):
    net, rows = Net(affine), sum(sizes)
    train_steps(net, [(batch(rows, 2, 3, 3, seed=seed), rows) for seed in range(5)], scale=1.0)
    results = run_ranks(net_on_a_rank, len(sizes), sizes, affine, pickled, cap, timeout=90)
    for found in results:
        assert_all_close(found, state(net), rtol=1e-3, atol=1e-4)
    assert_same_bits(results)


def running_statistics(rank, world):
    layer = SyncBatchNorm(2, momentum=0.99)
    wrapper = DistributedDataParallel(layer)
    for _ in range(100):
        wrapper(parts_of_very_different_size(world)[rank]).mean().backward()
    return layer.running_mean, layer.running_var


def parts_of_very_different_size(world):
    return [
        torch.cat([torch.full((2, 1, 10 ** (i + 1)), base ** (i - 1)) for base in (0.1, 0.3)], dim=1)
        for i in range(world)
    ]


def test_running_statistics_are_those_of_all_values_when_parts_differ_a_hundredfold():
    joined = torch.cat([x.permute(1, 0, 2).reshape(2, -1) for x in parts_of_very_different_size(3)], dim=1)
    for mean, variance in run_ranks(running_statistics, 3, timeout=60):
        torch.testing.assert_close(mean, joined.mean(1))
        torch.testing.assert_close(variance, joined.var(1))


def values_far_from_zero(rank, world):
    layer = SyncBatchNorm(1, momentum=1.0)
    y = layer(part_of(batch(64, 1) + 1e4, rank, (40, 24)))
    return y.detach(), layer.running_var.clone()


def test_variance_survives_a_mean_that_is_much_larger():
    joined = batch(64, 1) + 1e4
    exact = joined.double()
    results = run_ranks(values_far_from_zero, 2, timeout=60)
    for _, variance in results:
        torch.testing.assert_close(variance.double(), exact.var(0), rtol=1e-3, atol=0)
    right = (exact - exact.mean(0)) / exact.var(0, correction=0).sqrt()
    torch.testing.assert_close(torch.cat([y for y, _ in results]).double(), right, rtol=1e-2, atol=1e-2)


def penalised(module, x):
    """A loss on the input's gradient, as in a gradient penalty."""
    x = x.clone().requires_grad_()
    y = module(x)
    (dx,) = torch.autograd.grad(loss_of(y), x, create_graph=True)
    dx.square().sum().backward()
    return x.grad


def double_backward(rank, world):
    # float64, since second derivatives of a normalisation nearly cancel
    layer = SyncBatchNorm.convert_sync_batchnorm(layer_for((3, 4), {}).double())
    found = penalised(layer, part_of(batch(5, 3, 4, dtype=torch.float64), rank, (3, 2)))
    dist.all_reduce(layer.weight.grad)
    return found, layer.weight.grad.clone()


def test_gradients_can_be_differentiated_again():
    layer = layer_for((3, 4), {}).double()
    wanted = penalised(layer, batch(5, 3, 4, dtype=torch.float64))
    results = run_ranks(double_backward, 2, timeout=60)
    torch.testing.assert_close(torch.cat([dx for dx, _ in results]), wanted)
    for _, weight_grad in results:
        torch.testing.assert_close(weight_grad, layer.weight.grad)


# -- dtypes and strides ------------------------------------------------------------------------


def low_precision(rank, world):
    half = Net().half()
    wrapper = DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(half))
    y = wrapper(batch(4, 2, 3, 3, seed=rank, dtype=torch.float16))
    y.sum().backward()
    dtypes = {y.dtype, *(p.grad.dtype for p in half.parameters()), half.features[1].running_var.dtype}

    mixed = SyncBatchNorm(3)
    x = part_of(batch(600, 3, 8, dtype=torch.bfloat16), rank, (500, 100)).requires_grad_()
    y = mixed(x)
    loss_of(y).backward()
    return dtypes, y.detach(), x.grad, mixed.running_var.clone(), mixed.weight.grad.dtype


def test_low_precision_inputs_have_statistics_in_float32():
    exact = nn.BatchNorm1d(3)
    x = batch(600, 3, 8, dtype=torch.bfloat16).float().requires_grad_()
    y = exact(x)
    loss_of(y).backward()
    results = run_ranks(low_precision, 2, timeout=60)
    for dtypes, *_, running_var, weight_dtype in results:
        assert dtypes == {torch.float16}
        assert weight_dtype == torch.float32
        torch.testing.assert_close(running_var, exact.running_var)
    found_y, found_dx = (torch.cat([result[i] for result in results]) for i in (1, 2))
    assert found_y.dtype == found_dx.dtype == torch.bfloat16
    torch.testing.assert_close(found_y.float(), y.detach(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found_dx.float(), x.grad, rtol=5e-2, atol=5e-2)


def strided(rank, world):
    facts = []
    for memory_format, shape in ((torch.channels_last, (4, 4)), (torch.channels_last_3d, (4, 4, 4))):
        wrapper = DistributedDataParallel(SyncBatchNorm(2, momentum=0.99))
        x = part_of(batch(4, 2, *shape), rank, (2, 2)).to(memory_format=memory_format).requires_grad_()
        y = wrapper(x)
        loss_of(y).backward()
        kept = all(t.is_contiguous(memory_format=memory_format) for t in (y, x.grad))
        facts.append((kept, y.detach(), x.grad, state(wrapper.module)))
    return facts


def test_channels_last_is_kept_and_right():
    results = run_ranks(strided, 2, timeout=60)
    for number, shape in enumerate([(4, 4), (4, 4, 4)]):
        layer = BATCH_NORMS[len(shape) + 2](2, momentum=0.99)
        x = batch(4, 2, *shape).requires_grad_()
        y = layer(x)
        loss_of(y).backward()
        facts = [result[number] for result in results]
        assert all(kept for kept, *_ in facts)
        torch.testing.assert_close(torch.cat([f[1] for f in facts]), y.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.cat([f[2] for f in facts]), x.grad, rtol=1e-3, atol=1e-4)
        assert_all_close(facts[0][3], state(layer))


# -- which ranks, and when ---------------------------------------------------------------------


def evaluation_on_rank_0_alone(rank, world):
    wrapper = DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(Net()))
    layer = SyncBatchNorm(2, track_running_stats=False)
    wrapper(batch(2, 2, 3, 3, seed=rank)).sum().backward()
    layer(batch(2, 2, seed=rank))
    calls = None
    if rank == 0:
        wrapper.eval()
        layer.eval()
        before = state(wrapper)
        with CountedCollectives() as counted:
            evaluated = wrapper(batch(1, 2, 3, 3)), layer(batch(4, 2))
        calls = counted.calls
        plain = Net().eval()
        plain.load_state_dict(before)
        torch.testing.assert_close(evaluated[0], plain(batch(1, 2, 3, 3)))
        torch.testing.assert_close(evaluated[1], nn.BatchNorm1d(2, track_running_stats=False)(batch(4, 2)))
        assert_same_bits([before, state(wrapper)])
    dist.barrier()
    return calls


def test_evaluation_does_not_communicate():
    assert run_ranks(evaluation_on_rank_0_alone, 2, timeout=60) == [[], None]


class UsedByRank(nn.Module):
    """Rank 0 alone uses the layer whose gradients come first in backward, before those of ``norm``."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(0)
        self.rank = rank
        self.first, self.norm, self.optional = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        x = self.norm(self.first(x))
        return self.last(self.optional(x) if self.rank == 0 else x)


def ranks_that_launch_at_different_times(rank, world):
    net = SyncBatchNorm.convert_sync_batchnorm(UsedByRank(rank))
    wrapper = DistributedDataParallel(net, find_unused_parameters=True, bucket_cap_mb=TINY_BUCKETS)
    for step in range(4):
        wrapper.zero_grad()
        wrapper(batch(3, 4, seed=10 * step + rank)).square().sum().backward()
    return grads(net)


def test_statistics_and_buckets_may_be_issued_in_different_orders_on_each_rank():
    results = run_ranks(ranks_that_launch_at_different_times, 2, timeout=60)
    assert_same_bits(results)
    nets = [UsedByRank(rank) for rank in range(2)]
    nets[1].norm = nets[0].norm  # one layer for both parts of the batch
    hidden = [net.first(batch(3, 4, seed=30 + rank)) for rank, net in enumerate(nets)]
    normalised = nets[0].norm(torch.cat(hidden)).split(3)
    loss = nets[0].last(nets[0].optional(normalised[0])).square().sum()
    (loss + nets[1].last(normalised[1]).square().sum()).backward()
    for name, found in results[0].items():
        held = [net.get_parameter(name).grad for net in nets[: 1 if name.startswith("norm") else 2]]
        wanted = sum(grad for grad in held if grad is not None) / 2
        torch.testing.assert_close(
            found, wanted, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def two_halves(rank, world):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    net = SyncBatchNorm.convert_sync_batchnorm(Net(), group)
    layers = [m for m in net.modules() if isinstance(m, SyncBatchNorm)]
    assert len(layers) == 3 and all(layer.process_group is group for layer in layers)
    layer = SyncBatchNorm(2, process_group=group)
    return layer(batch(2, 2, seed=rank)).detach()


def test_a_process_group_limits_who_forms_a_batch():
    results = run_ranks(two_halves, 4, timeout=60)
    for pair in ((0, 1), (2, 3)):
        wanted = nn.BatchNorm1d(2)(torch.cat([batch(2, 2, seed=rank) for rank in pair]))
        torch.testing.assert_close(torch.cat([results[rank] for rank in pair]), wanted.detach())


def too_small(rank, world):
    layer = SyncBatchNorm(2)
    messages = []
    for sizes in ((1, 0), (0, 1)):
        try:
            layer(part_of(batch(1, 2), rank, sizes))
        except ValueError as error:
            messages.append(str(error))
    before = state(layer)
    empty = layer(torch.empty(0, 2))
    after = state(layer)
    return messages, empty.shape, before, after


def test_one_value_a_channel_is_an_error_on_every_rank_and_no_value_changes_nothing():
    for messages, shape, before, after in run_ranks(too_small, 2, timeout=60):
        assert len(messages) == 2
        assert all(
            text.startswith("Expected more than 1 value per channel when training") for text in messages
        )
        assert shape == (0, 2)
        assert_same_bits([before, after])


def test_one_rank_takes_the_same_path(tmp_path):
    x = batch(4, 3, 2)
    for options in OPTIONS:
        plain = layer_for((3, 2), options)
        before_group = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
        in_group = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
        wanted = plain(x)
        torch.testing.assert_close(before_group(x), wanted)
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/{id(options)}", rank=0, world_size=1)
        torch.testing.assert_close(in_group(x), wanted)
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            in_group(x[:1, :, :1])
        dist.destroy_process_group()
        assert_all_close(state(in_group), state(plain))


def runs_out_early(rank, world):
    net = SyncBatchNorm.convert_sync_batchnorm(Net())
    wrapper = DistributedDataParallel(net)
    steps = 0
    try:
        with wrapper.join(throw_on_early_termination=True):
            for _ in range(6 if rank == 0 else 3):
                wrapper(batch(2, 2, 3, 3, seed=rank)).sum().backward()
                steps += 1
    except RuntimeError as error:
        return steps, str(error), state(net)
    return steps, "fine", state(net)


def test_join_that_throws_on_early_termination_works_with_synchronised_layers():
    (steps, message, net), (other_steps, other_message, other_net) = run_ranks(runs_out_early, 2, timeout=60)
    assert steps == other_steps == 3
    assert "Detected at least one rank that exhausted inputs" in message
    assert "Rank 1 exhausted all inputs" in other_message
    assert_same_bits([net, other_net])


def one_rank_stays_away(rank, world):
    net = SyncBatchNorm.convert_sync_batchnorm(Net())
    net(batch(2, 2, 3, 3, seed=rank))
    if rank == 1:
        dist.barrier()
    try:
        net(batch(2, 2, 3, 3, seed=rank))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def test_a_rank_that_does_not_come_is_named_along_with_the_layer():
    outcomes = rank_outcomes(one_rank_stays_away, 2, timeout=30, group_timeout=3)
    message = outcomes[0].value
    assert message.startswith("CollectiveTimeoutError"), message
    assert "rank 1 did not come" in message
    assert "forward of SyncBatchNorm features.1" in message


def backward_raises_before_or_behind_the_layer(rank, world, behind):
    layer = SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2)))
    messages = []
    for step in range(4):
        fails = step == 1 and rank == 1
        x = batch(2, 2, seed=rank).requires_grad_()
        y = layer(FailsInBackward.apply(x, fails)) if behind else FailsInBackward.apply(layer(x), fails)
        try:
            loss_of(y).backward()
            messages.append("fine")
        except (ValueError, RuntimeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
        if step == 1:
            StatisticsExchange.abandon()  # as the reducer does where a pass failed on any rank
    return messages, y.detach()


@pytest.mark.parametrize("behind", [False, True])
def test_a_backward_that_raises_frees_the_ranks_that_wait_and_training_goes_on(behind):
    (waited, y), (raised, other_y) = run_ranks(
        backward_raises_before_or_behind_the_layer, 2, behind, timeout=60
    )
    assert raised == ["fine", "ValueError: bad sample 4711", "fine", "fine"]
    assert waited[:1] + waited[2:] == ["fine"] * 3
    if behind:
        assert waited[1] == "fine"  # its own part was done when the other rank raised
    else:
        assert waited[1].startswith("PeerFailedError") and "exception on rank 1" in waited[1]
        assert "backward of SyncBatchNorm 0" in waited[1]
    wanted = nn.BatchNorm1d(2)(torch.cat([batch(2, 2, seed=rank) for rank in range(2)]))
    torch.testing.assert_close(torch.cat([y, other_y]), wanted.detach(), rtol=1e-4, atol=1e-5)


def compiled(rank, world):
    net = SyncBatchNorm.convert_sync_batchnorm(Net())
    plain = copy.deepcopy(net)
    for module in (torch.compile(net, backend="aot_eager"), plain):
        for step in range(2):
            module(batch(2, 2, 3, 3, seed=10 * step + rank)).square().sum().backward()
    return grads(net) | state(net), grads(plain) | state(plain)


def test_a_compiled_net_computes_the_same():
    for found, wanted in run_ranks(compiled, 2, timeout=90):
        assert_all_close(found, wanted, rtol=1e-4, atol=1e-4)


def recomputed(rank, world):
    plain = SyncBatchNorm.convert_sync_batchnorm(Net())
    plain(batch(2, 2, 3, 3, seed=rank)).square().sum().backward()
    found = []
    for reentrant in (True, False):
        net = SyncBatchNorm.convert_sync_batchnorm(Net())
        x = batch(2, 2, 3, 3, seed=rank).requires_grad_()
        checkpoint(net, x, use_reentrant=reentrant).square().sum().backward()
        found.append(grads(net))
    return grads(plain), found


def test_gradient_checkpointing_gives_the_same_gradients():
    for wanted, found in run_ranks(recomputed, 2, timeout=60):
        for kind in found:
            assert_all_close(kind, wanted, rtol=1e-4, atol=1e-4)


# -- conversion --------------------------------------------------------------------------------


def test_conversion_keeps_everything_but_the_class():
    net = Net().double()
    net.features[1].eval()
    net.features[4].momentum, net.features[4].eps = None, 0.5
    net.features[4].weight.requires_grad_(False)
    parameters, keys = dict(net.named_parameters()), list(net.state_dict())
    converted = SyncBatchNorm.convert_sync_batchnorm(net)
    assert converted is net
    assert list(net.state_dict()) == keys
    assert all(parameter is parameters[name] for name, parameter in net.named_parameters())
    layers = [net.features[1], net.features[4], net.head[2]]
    assert all(type(layer) is SyncBatchNorm for layer in layers)
    assert all(isinstance(layer, nn.SyncBatchNorm) for layer in layers)
    assert [layer.training for layer in layers] == [False, True, True]
    assert (layers[1].momentum, layers[1].eps, layers[1].weight.requires_grad) == (None, 0.5, False)
    assert layers[0].running_mean.dtype == torch.float64


def test_conversion_of_a_layer_by_itself_of_torchs_layers_and_of_shared_ones():
    assert type(SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(3))) is SyncBatchNorm
    of_torch = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    assert type(SyncBatchNorm.convert_sync_batchnorm(of_torch)[0]) is SyncBatchNorm
    shared = nn.BatchNorm1d(3)
    net = SyncBatchNorm.convert_sync_batchnorm(nn.ModuleList([shared, shared, nn.ModuleList([shared])]))
    assert net[0] is net[1] is net[2][0] and type(net[0]) is SyncBatchNorm


def test_conversion_needs_to_know_the_number_of_channels():
    with pytest.raises(ValueError, match="0 is a LazyBatchNorm1d"):
        SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


def test_copies_and_state_travel():
    layer = SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    nn.BatchNorm1d(3).load_state_dict(layer[0].state_dict())
    file = io.BytesIO()
    torch.save(copy.deepcopy(layer), file)
    assert_same_bits([state(layer), state(torch.load(io.BytesIO(file.getvalue()), weights_only=False))])
