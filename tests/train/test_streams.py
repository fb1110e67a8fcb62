"""Iterable data sets and loaders of one's own: the same losses in every layout, and ends that stop no one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, get_worker_info

from paceline.errors import ArgumentError
from paceline.train.streams import Dealing, Stream, stream_loader
from paceline.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.models import Points, Regression, losses, settings, weights

SAMPLES = 21


class Flow(IterableDataset[Any]):
    """The points one after the other, in an order that is drawn anew in each pass."""

    def __init__(self, size: int = SAMPLES, shuffle: bool = True) -> None:
        self.points, self.shuffle = Points(size), shuffle

    def __iter__(self) -> Iterator[Any]:
        order = list(range(len(self.points)))
        if self.shuffle:
            random.shuffle(order)
        yield from (self.points[index] for index in order)


class SplitFlow(Flow):
    """The same, dealt out to worker processes by the data set itself, as torch's documentation shows."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        yield from list(super().__iter__())[first::step]


class FlowOfKnownLength(Flow):
    """The same with a length."""

    def __len__(self) -> int:
        return len(self.points)


def as_numbers(loaded: list[Any]) -> list[list[float]]:
    return [[round(float(each), 6) for each in inputs["labels"][:count]] for inputs, count in loaded]


@pytest.mark.parametrize(
    ("flow", "workers", "world_size"), [(Flow, 0, 4), (Flow, 2, 2), (SplitFlow, 2, 2), (SplitFlow, 1, 1)]
)
def test_shares_make_up_the_stream(
    flow: Any, workers: int, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Disjoint, complete, and the same global batches whatever the layout."""
    args = settings(tmp_path, dataloader_num_workers=workers)
    monkeypatch.setattr(type(args), "world_size", world_size)
    shares = []
    for rank in range(world_size):
        monkeypatch.setattr(type(args), "process_index", rank)
        loader = stream_loader(flow(), torch.utils.data.default_collate, args, 8 // world_size, True)
        shares.append(as_numbers(list(loader)))
    together = [sorted(chain(*group)) for group in zip(*shares, strict=True)]
    monkeypatch.undo()
    alone = as_numbers(
        list(stream_loader(Flow(), torch.utils.data.default_collate, settings(tmp_path), 8, True))
    )
    assert together == [sorted(group) for group in alone]
    assert [len(group) for group in together] == [8, 8, 5]


def test_an_epoch_is_a_function_of_the_seed_and_its_number() -> None:
    def labels(epoch: int, seed: int = 1, skipped: int = 0) -> list[float]:
        stream = Stream(Flow(), Dealing(4, 1, range(1), seed, True))
        stream.start_at(epoch, skipped)
        random.seed(epoch * 100 + skipped)  # what others have drawn makes no difference
        return [float(sample["labels"]) for raw in stream for sample in raw.samples]

    assert labels(0) == labels(0)
    assert labels(0) != labels(1)
    assert labels(0) != labels(0, seed=2)
    assert labels(1, skipped=2) == labels(1)[8:]


class OwnLoader(Trainer):
    """Each rank reads batches of its own; rank 0 has five, the others fewer and fewer."""

    def get_train_dataloader(self) -> Any:
        rank, per_rank = self.args.process_index, 2
        points = Points(40)
        own = [points[40 // 4 * rank + index] for index in range(max(0, 10 - 6 * rank))]
        return [
            torch.utils.data.default_collate(own[start : start + per_rank])
            for start in range(0, len(own), per_rank)
        ]


class WholeBatches(Trainer):
    """A loader with a batch sampler of its own."""

    def get_train_dataloader(self) -> Any:
        batches = Fixed(SequentialSampler(self.train_dataset), 4 // self.args.world_size, False)
        return self.accelerator.prepare(DataLoader(self.train_dataset, batch_sampler=batches))


class Fixed(BatchSampler):
    pass


def trained(trainer: Trainer) -> tuple[list[float], dict[str, Tensor]]:
    trainer.train()
    return losses(trainer), weights(trainer.model)


def train_streams(rank: int, world_size: int, folder: Path, workers: int) -> dict[str, Any]:
    """Several kinds of data, always eight samples a step (own batches: as they come)."""

    def values(**changes: Any) -> Any:
        size = 8 // world_size // 2
        common = {"gradient_accumulation_steps": 2, "dataloader_num_workers": workers, "max_steps": 7}
        return settings(folder, **{"per_device_train_batch_size": size, **common, **changes})

    found: dict[str, Any] = {"stream": trained(Trainer(Regression(), values(), train_dataset=Flow()))}
    if workers:
        return found
    found |= {
        "known length": trained(
            Trainer(Regression(), values(max_steps=-1, num_train_epochs=2), train_dataset=FlowOfKnownLength())
        ),
        "full batches only": trained(
            Trainer(Regression(), values(dataloader_drop_last=True, max_steps=4), train_dataset=Flow())
        ),
        "whole batches": trained(
            WholeBatches(
                Regression(),
                values(max_steps=-1, num_train_epochs=1, gradient_accumulation_steps=1),
                train_dataset=Points(18),
            )
        ),
    }
    if world_size > 1:
        found["own"] = trained(OwnLoader(Regression(), values(max_steps=3, gradient_accumulation_steps=1)))
    trainer = Trainer(Regression(), values(), eval_dataset=Flow(shuffle=False))
    trainer.compute_metrics = lambda prediction: {"first": float(prediction.label_ids[0])}
    found["evaluation"] = trainer.evaluate()["eval_loss"], trainer.predict(Flow(shuffle=False)).label_ids
    return found


def test_layouts_agree_and_unequal_ends_stop_no_one(tmp_path: Path) -> None:
    (want,) = run_ranks(train_streams, 1, tmp_path, 0, backend=None, timeout=90)
    assert [len(want[name][0]) for name in ("stream", "known length", "full batches only")] == [7, 6, 4]
    for world_size, workers in [(2, 2), (4, 0)]:
        for found in run_ranks(train_streams, world_size, tmp_path, workers, backend=None, timeout=90):
            for name in found.keys() - {"own", "evaluation"}:
                assert found[name][0] == pytest.approx(want[name][0], rel=1e-5), name
                for key, value in want[name][1].items():
                    torch.testing.assert_close(found[name][1][key], value, rtol=1e-5, atol=1e-6)
            if workers:
                continue
            loss, labels = found["evaluation"]
            assert loss == pytest.approx(want["evaluation"][0])
            assert labels.tolist() == want["evaluation"][1].tolist() == Points(SAMPLES).y.tolist()
            own_losses, own_weights = train_own_batches_alone(world_size)
            assert found["own"][0] == pytest.approx(own_losses, rel=1e-5)
            for key, value in own_weights.items():
                torch.testing.assert_close(found["own"][1][key], value, rtol=1e-5, atol=1e-6)


def train_own_batches_alone(world_size: int) -> tuple[list[float], dict[str, Tensor]]:
    """What the ranks of OwnLoader do together, in one process: each step the mean over what there is."""
    model, points = Regression(), Points(40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        indices = [
            10 * rank + index
            for rank in range(world_size)
            for index in range(max(0, 10 - 6 * rank))[2 * step : 2 * step + 2]
        ]
        loss = model(points.x[indices], points.y[indices])["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, weights(model)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_resumes_where_it_stood(tmp_path: Path, workers: int) -> None:
    values = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "dataloader_num_workers": workers}
    values["dataloader_persistent_workers"] = workers > 0
    whole = Trainer(Regression(dropout=0.2), settings(tmp_path, **values), train_dataset=Flow())
    whole.train()
    again = Trainer(Regression(dropout=0.2), settings(tmp_path, **values), train_dataset=Flow())
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert losses(again) == losses(whole)
    for name, value in weights(whole.model).items():
        assert torch.equal(weights(again.model)[name], value)


def test_a_stream_that_dries_up_ends_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Once(IterableDataset[Any]):
        def __init__(self) -> None:
            self.source = iter([Points(10)[index] for index in range(10)])

        def __iter__(self) -> Iterator[Any]:
            return self.source

    trainer = Trainer(Regression(), settings(tmp_path, max_steps=50), train_dataset=Once())
    trainer.train()
    assert trainer.state.global_step == 3
    assert "no sample in epoch 1" in caplog.text


def test_a_stream_without_length_needs_max_steps(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="set max_steps"):
        Trainer(Regression(), settings(tmp_path), train_dataset=Flow()).train()


def test_a_stream_of_datasets_is_shuffled_by_epoch(tmp_path: Path) -> None:
    """Hugging Face's own streams: their set_epoch is called, their columns are dropped."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict(
        {"x": Points(12).x.tolist(), "labels": Points(12).y.tolist(), "text": ["a"] * 12}
    )
    stream = rows.to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=4)
    args = settings(tmp_path, max_steps=6, dataloader_num_workers=2)
    trainer = Trainer(Regression(), args, train_dataset=stream)
    trainer.train()
    assert trainer.state.global_step == 6
    given = [loaded.inputs["labels"].tolist() for loaded in trainer.get_train_dataloader()]
    assert sorted(chain(*given)) == pytest.approx(sorted(Points(12).y.tolist()))
