"""How samples are dealt out: each once, in an order that no layout changes."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from paceline.errors import ArgumentError
from paceline.train.batches import UsedEntries, batch_size_of, default_collate, to_device
from paceline.train.data import EpochPlan, StepBatches, eval_batches, train_loader
from paceline.train.orders import EpochOrder, LengthGroupedOrder, even_part, lengths_of
from paceline.train.sampler import DistributedSampler
from tests.train.models import settings

plans = st.builds(
    EpochPlan,
    num_samples=st.integers(0, 200),
    per_rank=st.integers(1, 5),
    world_size=st.integers(1, 5),
    accumulation=st.integers(1, 4),
    drop_last=st.booleans(),
)


@given(plans)
def test_each_sample_is_dealt_once_and_in_order(plan: EpochPlan) -> None:
    dealt = [
        position
        for step in range(plan.steps)
        for micro in range(plan.micro_batches(step))
        for rank in range(plan.world_size)
        for position in plan.share(step, micro, rank)
    ]
    whole_steps = plan.num_samples - plan.num_samples % plan.global_size
    assert dealt == list(range(whole_steps if plan.drop_last else plan.num_samples))


@given(plans)
def test_shares_are_even_and_fit(plan: EpochPlan) -> None:
    for step in range(plan.steps):
        for micro in range(plan.micro_batches(step)):
            sizes = [len(plan.share(step, micro, rank)) for rank in range(plan.world_size)]
            assert max(sizes) <= plan.per_rank
            assert max(sizes) - min(sizes) <= 1
            assert sum(sizes) > 0


@given(st.integers(0, 100), st.integers(1, 7))
def test_even_parts_make_up_the_whole(size: int, parts: int) -> None:
    assert [value for part in range(parts) for value in even_part(size, parts, part)] == list(range(size))


def test_an_epochs_order_depends_on_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = EpochOrder(50, seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    torch.manual_seed(1)
    first = order(3, 0)
    torch.manual_seed(2)
    assert first == order(3, 0)
    assert sorted(first) == list(range(50))
    assert len({tuple(order(seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16


def test_it_starts_anywhere_at_once() -> None:
    batches = StepBatches(EpochOrder(103, 1), EpochPlan(103, 2, 3, 2), rank=1, seed=0)
    batches.start_at(epoch=2)
    whole = list(batches)
    assert len(whole) == len(batches) == 18
    batches.start_at(epoch=2, step=5)
    assert list(batches) == whole[10:]


def test_an_empty_share_is_one_sample_that_does_not_count() -> None:
    plan = EpochPlan(num_samples=5, per_rank=2, world_size=2, accumulation=1)
    batches = StepBatches(EpochOrder(5, shuffle=False), plan, rank=1, seed=0)
    assert list(batches) == [[2, 3], [0]]
    assert len(plan.share(1, 0, 1)) == 0


class Random:
    """Samples that are nothing but random numbers, of all three generators."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        import random

        return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])


@pytest.mark.parametrize("workers", [1, 2])
def test_augmentation_does_not_depend_on_the_workers(tmp_path: Path, workers: int) -> None:
    def draw(number: int) -> list[Any]:
        args = settings(tmp_path, dataloader_num_workers=number, per_device_train_batch_size=2)
        return list(train_loader(Random(), EpochOrder(12), torch.stack, args))

    alone, shared = torch.cat(draw(0)), torch.cat(draw(workers))
    assert torch.equal(alone, shared)
    assert len(alone.unique()) == alone.numel()


def test_default_collator_renames_labels_and_leaves_text_out() -> None:
    batch = default_collate(
        [{"x": torch.ones(2), "label": 3, "text": "a"}, {"x": torch.zeros(2), "label": 4}]
    )
    assert set(batch) == {"x", "labels"}
    assert batch["labels"].tolist() == [3, 4]


def test_default_collator_takes_lists_arrays_and_numbers() -> None:
    samples = [
        {"ids": [1, 2, 3], "array": np.ones(2, np.float32), "number": 0.5, "labels": n} for n in (0, 1)
    ]
    batch = default_collate(samples)
    assert batch["ids"].tolist() == [[1, 2, 3]] * 2
    assert batch["array"].shape == (2, 2)
    assert batch["number"].dtype == batch["array"].dtype == torch.float32
    assert batch["labels"].dtype == torch.int64


def test_unused_columns_are_dropped_before_collating() -> None:
    collate = UsedEntries(default_collate, frozenset(["x"]))
    assert set(collate([{"x": 1, "odd": [1, 2]}, {"x": 2, "odd": [1]}])) == {"x"}


def test_to_device_keeps_the_structure() -> None:
    moved = to_device({"a": [torch.ones(1)], "b": (torch.ones(1), "text")}, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["b"][0].is_meta
    assert moved["b"][1] == "text"


def shares(size: int, ranks: int, **settings: Any) -> list[DistributedSampler]:
    return [
        DistributedSampler(range(size), num_replicas=ranks, rank=rank, **settings) for rank in range(ranks)
    ]


@given(st.integers(1, 60), st.integers(1, 5), st.booleans(), st.booleans())
def test_sampler_gives_disjoint_shares(size: int, ranks: int, shuffle: bool, drop_last: bool) -> None:
    samplers = shares(size, ranks, shuffle=shuffle, drop_last=drop_last)
    given_out = [list(sampler) for sampler in samplers]
    assert [len(each) for each in given_out] == [len(sampler) for sampler in samplers]
    everything = sorted(chain.from_iterable(given_out))
    assert len(set(everything)) == len(everything) == (size - size % ranks if drop_last else size)


def test_sampler_epochs_differ_by_themselves_and_can_be_chosen() -> None:
    (sampler,) = shares(40, 1)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    (sampler,) = shares(40, 1, shuffle=False)
    assert list(sampler) == list(sampler) == list(range(40))


def test_sampler_stands_in_for_torchs() -> None:
    theirs = torch.utils.data.distributed.DistributedSampler(range(20), 4, 1, shuffle=False)
    ours = DistributedSampler(range(20), 4, 1, shuffle=False)
    assert list(ours) == list(theirs)
    assert (ours.num_samples, ours.total_size) == (theirs.num_samples, theirs.total_size)
    assert len(DataLoader(range(20), batch_size=2, sampler=ours)) == 3  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank is 4"):
        DistributedSampler(range(20), 4, 4)


def test_samples_of_like_length_stand_together() -> None:
    lengths = [(index * 37) % 101 + 1 for index in range(200)]
    order = LengthGroupedOrder(lengths, batch_size=8, seed=3)
    first = list(order)
    assert sorted(first) == list(range(200))
    assert lengths[first[0]] == max(lengths)
    spread = [
        max(lengths[i] for i in first[s : s + 8]) - min(lengths[i] for i in first[s : s + 8])
        for s in range(0, 200, 8)
    ]
    assert sum(spread) / len(spread) < 30  # a random batch of eight spreads over some eighty
    order.set_epoch(1)
    assert list(order) != first
    order.set_epoch(0)
    assert list(order) == first


def test_lengths_come_from_a_column_or_the_samples() -> None:
    samples = [{"input_ids": [0] * size} for size in (3, 1, 2)]
    assert list(lengths_of(samples, "length", "input_ids")) == [3, 1, 2]
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"input_ids": [[1], [2]], "size": [5, 6]})
    assert list(lengths_of(rows, "size", "input_ids")) == [5, 6]
    with pytest.raises(ArgumentError, match="'tokens'"):
        lengths_of(samples, "length", "tokens")


def test_the_size_of_a_batch_is_found() -> None:
    assert batch_size_of({"a": "text", "b": torch.zeros(3, 2)}) == 3
    assert batch_size_of((torch.zeros(4), torch.zeros(4, 9))) == 4
    assert batch_size_of(torch.tensor(1.0)) == 1


@pytest.mark.parametrize(("size", "per_rank"), [(33, 8), (32, 8), (9, 2), (7, 3), (3, 2), (100, 7)])
def test_ranks_evaluate_equally_many_batches(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, size: int, per_rank: int
) -> None:
    args = settings(tmp_path, per_device_eval_batch_size=per_rank)
    monkeypatch.setattr(type(args), "world_size", 2)
    dealt = []
    for rank in range(2):
        monkeypatch.setattr(type(args), "process_index", rank)
        dealt.append(eval_batches(range(size), args).own)
    assert len(dealt[0]) == len(dealt[1])
    assert [index for batches in dealt for batch in batches for index in batch] == list(range(size))
    assert max(len(batch) for batches in dealt for batch in batches) <= per_rank
