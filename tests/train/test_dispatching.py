"""dispatch_batches: rank 0 reads for all, and the numbers are those of one rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from paceline.errors import ArgumentError, PeerFailedError
from paceline.train.evaluation import EvalPrediction
from paceline.train.streams import stream_loader
from paceline.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.models import Points, Regression, losses, settings, weights

SAMPLES = 21


class ReadOnRankZero(Points):
    """Points that neither another rank nor its workers may read."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.rank = dist.get_rank()

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        assert self.rank == 0, f"rank {self.rank} reads"
        return super().__getitem__(index)


class FlowOnRankZero(IterableDataset[Any]):
    """The same one after the other; shuffled, in an order that nobody could repeat."""

    def __init__(self, shuffle: bool = False) -> None:
        self.points, self.shuffle = ReadOnRankZero(SAMPLES), shuffle

    def __iter__(self) -> Iterator[Any]:
        order = list(range(SAMPLES))
        if self.shuffle:
            random.SystemRandom().shuffle(order)
        yield from (self.points[index] for index in order)


class Whole(BatchSampler):
    """A batch sampler of the user's own: batches go to the ranks as they are."""


class OwnLoaders(Trainer):
    """Loaders as scripts make them themselves."""

    def get_train_dataloader(self) -> Any:
        batches = Whole(SequentialSampler(self.train_dataset), 4 // self.args.world_size, False)
        return self.accelerator.prepare(DataLoader(self.train_dataset, batch_sampler=batches))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return DataLoader(self.eval_dataset, batch_size=3)


class Metrics:
    """compute_metrics: all labels there are; called at the end, or after each round."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __call__(self, prediction: EvalPrediction, compute_result: bool = True) -> dict[str, Any]:
        self.seen += prediction.label_ids.tolist()
        return {"labels": sum(self.seen), "count": len(self.seen)} if compute_result else {}


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A collator whose batches are of another shape on every rank, as tokenizers' are."""
    batch = torch.utils.data.default_collate(samples)
    filler = torch.zeros(len(samples), int(batch["labels"][0] * 100) % 5)
    return {**batch, "filler": filler}


class Padded(Regression):
    """Takes such batches."""

    def forward(self, x: Tensor, labels: Tensor | None = None, filler: Any = None) -> dict[str, Tensor]:
        return super().forward(x, labels)


def ways(rank: int, world_size: int, folder: Path, workers: int) -> dict[str, Any]:
    """What each way of giving data comes to."""

    def values(**changes: Any) -> Any:
        common: dict[str, Any] = {
            "accelerator_config": {"dispatch_batches": True, "split_batches": True},
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 2,
            "dataloader_num_workers": workers,
            "dataloader_persistent_workers": workers > 0,
        }
        return settings(folder, **{**common, **changes})

    def trained(trainer: Trainer) -> Any:
        trainer.train()
        return losses(trainer), weights(trainer.model)

    def evaluated(dataset: Any, kind: Any = Trainer, **changes: Any) -> Any:
        trainer = kind(Regression(), values(**changes), eval_dataset=dataset, compute_metrics=Metrics())
        found = trainer.evaluate()
        return [found[name] for name in ("eval_loss", "eval_labels", "eval_count")]

    points = ReadOnRankZero(SAMPLES)
    found = {
        "indices": trained(Trainer(Regression(), values(), train_dataset=points)),
        "stream": trained(Trainer(Regression(), values(max_steps=5), train_dataset=FlowOnRankZero())),
        "evaluated stream": evaluated(FlowOnRankZero()),
    }
    if workers:
        return found
    trainer = Trainer(Regression(), values(), eval_dataset=points)
    return found | {
        "shapes": trained(Trainer(Padded(), values(), data_collator=padded, train_dataset=points)),
        "whole batches": trained(
            OwnLoaders(Regression(), values(gradient_accumulation_steps=1), train_dataset=ReadOnRankZero(18))
        ),
        "evaluated": evaluated(ReadOnRankZero(11)),
        "evaluated by a loader": evaluated(points, OwnLoaders),
        "fewer than ranks": evaluated(ReadOnRankZero(1)),
        "round by round": evaluated(points, batch_eval_metrics=True),
        "one short round by round": evaluated(ReadOnRankZero(9), batch_eval_metrics=True),
        "predicted": trainer.predict(points).label_ids.tolist(),
        "predicted stream": trainer.predict(FlowOnRankZero()).label_ids.tolist(),
    }


@pytest.mark.parametrize(("world_size", "workers"), [(2, 0), (4, 0), (2, 2)])
def test_the_numbers_are_those_of_one_rank(tmp_path: Path, world_size: int, workers: int) -> None:
    (want,) = run_ranks(ways, 1, tmp_path, 0, timeout=60)
    assert want["predicted"] == Points(SAMPLES).y.tolist()
    for found in run_ranks(ways, world_size, tmp_path, workers, timeout=150, group_timeout=90):
        for way, result in found.items():
            torch.testing.assert_close(result, want[way], rtol=2e-5, atol=1e-5, msg=f"{way}: {result}")


def shuffled_labels(rank: int, world_size: int, folder: Path) -> list[float]:
    args = settings(folder, accelerator_config={"dispatch_batches": True}, per_device_train_batch_size=2)
    loader = stream_loader(FlowOnRankZero(shuffle=True), torch.utils.data.default_collate, args, 2, True)
    return [label for inputs, count in loader for label in inputs["labels"][:count].tolist()]


def test_a_stream_that_nobody_can_repeat_is_given_once(tmp_path: Path) -> None:
    parts = run_ranks(shuffled_labels, 2, tmp_path)
    assert sorted(parts[0] + parts[1]) == sorted(Points(SAMPLES).y.tolist())


def augmented(rank: int, world_size: int, folder: Path, dispatch: bool) -> dict[str, Tensor]:
    args = settings(folder, accelerator_config={"dispatch_batches": dispatch}, num_train_epochs=1)
    trainer = Trainer(Regression(dropout=0.5), args, train_dataset=Points(SAMPLES, noise=0.5))
    trainer.train()
    return weights(trainer.model)


def test_random_numbers_do_not_depend_on_who_reads(tmp_path: Path) -> None:
    want, found = (run_ranks(augmented, 2, tmp_path, dispatch) for dispatch in (False, True))
    torch.testing.assert_close(found, want, rtol=0, atol=0)


def resumed(rank: int, world_size: int, folder: Path, stream: bool) -> list[dict[str, Tensor]]:
    """The weights of a run in one go, and of one that goes on from its middle."""

    def run(output_dir: Path, resume: bool) -> dict[str, Tensor]:
        args = settings(
            output_dir,
            accelerator_config={"dispatch_batches": True},
            max_steps=5,
            save_strategy="steps",
            save_steps=4,
        )
        dataset = FlowOnRankZero() if stream else ReadOnRankZero(SAMPLES)
        trainer = Trainer(Regression(), args, train_dataset=dataset)
        trainer.train(resume_from_checkpoint=resume)
        return weights(trainer.model)

    return [run(folder, False), run(folder, True)]


@pytest.mark.parametrize("stream", [False, True])
def test_it_goes_on_where_it_was(tmp_path: Path, stream: bool) -> None:
    for in_one_go, gone_on in run_ranks(resumed, 2, tmp_path, stream, timeout=90):
        torch.testing.assert_close(gone_on, in_one_go, rtol=0, atol=0)


class Broken(ReadOnRankZero):
    """One of its samples cannot be read."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == 13:
            raise OSError("sample 13 cannot be read")
        return super().__getitem__(index)


def fails(rank: int, world_size: int, folder: Path, workers: int) -> str:
    args = settings(folder, accelerator_config={"dispatch_batches": True}, dataloader_num_workers=workers)
    trainer = Trainer(Regression(), args, train_dataset=Broken(SAMPLES), eval_dataset=Broken(SAMPLES))
    with pytest.raises(
        OSError if rank == 0 else PeerFailedError, match="sample 13 cannot be read"
    ) as training:
        trainer.train()
    with pytest.raises(OSError if rank == 0 else PeerFailedError, match="sample 13 cannot be read"):
        trainer.evaluate()
    return str(training.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_reading_raises_is_told_to_all(tmp_path: Path, workers: int) -> None:
    told = run_ranks(fails, 2, tmp_path, workers, timeout=120, group_timeout=90)
    assert "rank 1 waited for a batch of rank 0" in told[1]
    assert "OSError" in told[1]


def unsendable(rank: int, world_size: int, folder: Path) -> None:
    args = settings(folder, accelerator_config={"dispatch_batches": True}, remove_unused_columns=False)
    trainer = Trainer(Padded(), args, train_dataset=ReadOnRankZero(SAMPLES))
    trainer.data_collator = lambda samples: {**torch.utils.data.default_collate(samples), "filler": lambda: 0}
    with pytest.raises(Exception, match="pickle"):
        trainer.train()


def test_a_batch_that_cannot_be_sent_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(unsendable, 2, tmp_path)


def test_a_part_of_a_stream_is_not_taken_for_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    split = pytest.importorskip("datasets.distributed").split_dataset_by_node
    whole = datasets.Dataset.from_dict({"labels": [1.0, 2.0, 3.0, 4.0]}).to_iterable_dataset(num_shards=2)
    part = split(whole, rank=0, world_size=2)
    args = settings(tmp_path, accelerator_config={"dispatch_batches": True})
    monkeypatch.setattr(type(args), "world_size", 2)
    with pytest.raises(ArgumentError, match="split_dataset_by_node"):
        stream_loader(part, torch.utils.data.default_collate, args, 2, True)
