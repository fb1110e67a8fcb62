"""verify_replicas is silent on equal replicas, or names tensor, ranks and amount on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.engine.ddp import DistributedDataParallel
from paceline.engine.sync_batchnorm import SyncBatchNorm
from paceline.engine.verify import verify_replicas
from tests.engine.nets import Chain, rank_input
from tests.engine.test_pass import CountedCollectives
from tests.ranks import run_ranks

NAN, INF = float("nan"), float("inf")


class Holder(nn.Module):
    """A module of tensors of any dtype."""

    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            if tensor.is_floating_point() or tensor.is_complex():
                self.register_parameter(name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)


def verdict(module, **options):
    try:
        verify_replicas(module, dist.group.WORLD, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "equal"


def with_change(rank, world, changes):
    """Rank r's ``a`` and ``b`` with ``changes[r]``: name -> (flat index, value)."""
    module = Holder(a=torch.ones(4, 3), b=torch.ones(5))
    with torch.no_grad():
        for name, (index, value) in changes.get(rank, {}).items():
            module.get_parameter(name).view(-1)[index] = value
    return verdict(module)


def test_the_first_tensor_that_differs_is_named_with_ranks_and_amount():
    changes = {2: {"b": (1, 1.5)}, 3: {"b": (4, 0.75)}}
    for message in run_ranks(with_change, 4, changes, timeout=60):
        assert message == (
            "ReplicaMismatchError: b differs between rank 0 and ranks 2, 3: "
            "rank 2: largest difference 0.5 in 1 of 5 elements; "
            "rank 3: largest difference 0.25 in 1 of 5 elements"
        )
    for message in run_ranks(with_change, 2, {1: {"b": (1, 9.0), "a": (0, 3.0)}}, timeout=60):
        assert message.startswith(
            "ReplicaMismatchError: a differs between rank 0 and rank 1: largest difference 2 "
        )
    for message in run_ranks(with_change, 3, {0: {"a": (0, 3.0)}}, timeout=60):
        assert "a differs between rank 0 and ranks 1, 2" in message


def kinds(rank, world):
    """Pairs of what rank 0 and the other ranks hold -> verdict."""
    bits = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)  # two kinds of NaN
    pairs = {
        "one ulp": (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]).nextafter(torch.tensor(9.0))),
        "sign of zero": (torch.tensor([0.0]), torch.tensor([-0.0])),
        "signs": (torch.tensor([1.0, 2.0]), torch.tensor([-1.0, -2.0])),
        "swapped": (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
        "equal NaN": (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0])),
        "NaN on one": (torch.tensor([NAN, 1.0]), torch.tensor([3.0, 1.5])),
        "NaN of other bits": (bits[:1], bits[1:]),
        "infinities": (torch.tensor([INF, INF]), torch.tensor([INF, 1.0])),
        "bf16": (torch.ones(3, dtype=torch.bfloat16), torch.full((3,), 1.5, dtype=torch.bfloat16)),
        "fp16": (torch.ones(3, dtype=torch.float16), torch.full((3,), 1.5, dtype=torch.float16)),
        "bool": (torch.tensor([True, False]), torch.tensor([True, True])),
        "complex": (torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64) * (1 + 2j)),
        "int64": (torch.tensor([5, 7]), torch.tensor([5, 4])),
        "uint8": (torch.tensor([5, 7], dtype=torch.uint8), torch.tensor([7, 7], dtype=torch.uint8)),
        "scalar": (torch.tensor(3), torch.tensor(4)),
        "empty": (torch.empty(0), torch.empty(0)),
        "strides": (torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3).t().contiguous().t()),
        "strided difference": (
            torch.zeros(2, 3),
            torch.zeros(3, 2).index_put((torch.tensor(2),), torch.tensor(4.0)).t(),
        ),
    }
    return {
        name: verdict(Holder(x=pair[rank > 0].clone(memory_format=torch.preserve_format)))
        for name, pair in pairs.items()
    }


AMOUNTS = {
    "one ulp": "2.4e-07 in 2 of 2",
    "sign of zero": "0 in 1 of 1",
    "signs": "4 in 2 of 2",
    "swapped": "1 in 2 of 2",
    "equal NaN": None,
    "NaN on one": "0.5 in 2 of 2 elements, 1 of them NaN",
    "NaN of other bits": "0 in 1 of 1",
    "infinities": "inf in 1 of 2",
    "bf16": "0.5 in 3 of 3",
    "fp16": "0.5 in 3 of 3",
    "bool": "1 in 1 of 2",
    "complex": "2 in 2 of 2",
    "int64": "3 in 1 of 2",
    "uint8": "2 in 1 of 2",
    "scalar": "1 in 1 of 1",
    "empty": None,
    "strides": None,
    "strided difference": "4 in 2 of 6",
}


def test_every_dtype_is_compared_bit_for_bit_and_measured():
    for found in run_ranks(kinds, 2, timeout=60):
        assert found.keys() == AMOUNTS.keys()
        for name, amount in AMOUNTS.items():
            if amount is None:
                assert found[name] == "equal", name
            else:
                assert f"x differs between rank 0 and rank 1: largest difference {amount}" in found[name], (
                    name
                )


def other_forms(rank, world):
    one = Holder(a=torch.ones(2), b=torch.ones([3, 4][rank]))
    two = Holder(a=torch.ones(2, dtype=[torch.float32, torch.float64][rank]))
    three = Holder(**{name: torch.ones(2) for name in ["a", "b"][: rank + 1]})
    four = Holder(**{["a", "b"][rank]: torch.ones(2)})
    return [verdict(module) for module in (one, two, three, four)]


def test_models_that_are_not_alike_are_told_apart_from_values_that_differ():
    for shape, dtype, extra, name in run_ranks(other_forms, 2, timeout=60):
        assert "tensor 1 is b of shape [3], torch.float32 on rank 0 and b of shape [4]" in shape
        assert "torch.float64 on rank 1" in dtype
        assert "tensor 1 is nothing on rank 0 and b of" in extra
        assert "tensor 0 is a of" in name and "b of" in name


def in_training(rank, world):
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    synchronised = SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    found = []
    for net in (Chain(), synchronised, plain):
        wrapper = DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(net.parameters())
        for step in range(3):
            optimizer.zero_grad()
            wrapper(rank_input(rank, step)).square().sum().backward()
            optimizer.step()
        found.append(verdict(net))
    wrapper(rank_input(rank, 3))  # what a forward does to running statistics lasts until the next backward
    found.append(verdict(plain))
    found.append(verdict(plain, include_buffers=False))
    found.append(verdict(plain, ignored=[name for name, _ in plain.named_buffers()]))
    return found


def test_replicas_in_training_are_equal_and_buffers_of_batchnorm_are_explained():
    for *equal, after_forward, parameters, ignored in run_ranks(in_training, 2, timeout=60):
        assert [*equal, parameters, ignored] == ["equal"] * 5
        assert "1.running_mean differs between rank 0 and rank 1" in after_forward
        assert "It is a buffer" in after_forward and "next broadcast" in after_forward


def traffic(rank, world):
    module = Holder(**{f"p{index}": torch.ones(100, 100) for index in range(50)})
    with CountedCollectives() as counted:
        verify_replicas(module, dist.group.WORLD)
    return [name for name, _ in counted.calls]


def test_equal_replicas_cost_one_exchange():
    for calls in run_ranks(traffic, 2, timeout=60):
        assert calls == ["all_gather"]


LAYOUTS = {
    "coo": torch.Tensor.to_sparse_coo,
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
    "bsr": lambda dense: dense.to_sparse_bsr((1, 2)),
}


def sparse_verdicts(rank, world, layout):
    """Verdicts on a sparse buffer that is equal, or has another value, place or number of them on rank 1."""
    diagonal, shifted, full = torch.eye(2), torch.eye(2).flip(0), torch.ones(2, 2)
    verdicts = []
    for other in (diagonal, diagonal * 3, shifted, full):
        module = nn.Module()
        module.register_buffer("table", LAYOUTS[layout](other if rank == 1 else diagonal))
        verdicts.append(verdict(module))
    return verdicts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_tensors_are_compared_part_by_part(layout):
    for equal, value, place, more in run_ranks(sparse_verdicts, 2, layout, timeout=60):
        assert equal == "equal"
        assert "table.values() differs between rank 0 and rank 1" in value
        assert "largest difference 2" in value
        part = ".values()" if layout == "bsr" else "indices()"  # blocks of a row hold the places within
        assert f"{part} differs between rank 0 and rank 1" in place
        assert more.startswith("ReplicaMismatchError: ") and "table." in more


def test_other_layouts_are_refused_by_name(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    module = nn.Module()
    module.register_buffer("table", torch.eye(2).to_mkldnn())
    with pytest.raises(ValueError, match=r"table, which is torch\._mkldnn"):
        verify_replicas(module, dist.group.WORLD)
