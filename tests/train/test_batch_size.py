"""auto_find_batch_size: all ranks halve the batch until it fits, and train as if they had known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from paceline.errors import ArgumentError
from paceline.train.batch_size import is_out_of_memory
from paceline.train.callbacks import TrainerCallback
from paceline.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.models import Points, Regression, losses, settings, weights


class Flow(IterableDataset[Any]):
    """The same points as a stream."""

    def __init__(self, size: int) -> None:
        self.points = Points(size)

    def __iter__(self) -> Iterator[Any]:
        return (self.points[index] for index in range(len(self.points)))


class Hungry(Regression):
    """Has room for so many samples only; a buffer counts its forwards."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.forwards += 1
        if len(x) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().forward(x, labels)


def train_hungry(rank: int, world_size: int, folder: Path, rooms: list[int]) -> Any:
    args = settings(folder, auto_find_batch_size=True, per_device_train_batch_size=16, max_steps=3)
    trainer = Trainer(Hungry(rooms[rank]), args, train_dataset=Points(64))
    trainer.train()
    known = settings(folder, per_device_train_batch_size=4, max_steps=3)
    other = Trainer(Hungry(99), known, train_dataset=Points(64))
    other.train()
    found = (args.per_device_train_batch_size, losses(trainer), float(trainer.model.forwards))
    return (
        found,
        losses(other),
        all(torch.equal(weights(trainer.model)[name], value) for name, value in weights(other.model).items()),
    )


def test_all_ranks_go_by_the_one_with_the_least_room(tmp_path: Path) -> None:
    for (size, logged, forwards), want, same in run_ranks(train_hungry, 2, tmp_path, [7, 12], backend=None):
        assert size == 4
        assert logged == want
        assert forwards == 3  # those of the trials are undone
        assert same


def test_what_never_fits_and_what_is_another_error(tmp_path: Path) -> None:
    args = settings(tmp_path, auto_find_batch_size=True)
    with pytest.raises(ArgumentError, match="not even one sample"):
        Trainer(Hungry(0), args, train_dataset=Points(8)).train()

    class Wrong(Regression):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        Trainer(Wrong(), settings(tmp_path, auto_find_batch_size=True), train_dataset=Points(8)).train()
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not is_out_of_memory(ValueError("out of memory"))


class Peckish(Regression):
    """Has room for so many samples only from its fourth forward on."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.forwards = room, 0

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.forwards += 1
        if self.forwards > 3 and len(x) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().forward(x, labels)


@pytest.mark.parametrize("size", [16, 9])
def test_a_later_step_that_does_not_fit_is_taken_anew_in_smaller_parts(tmp_path: Path, size: int) -> None:
    args = settings(tmp_path, auto_find_batch_size=True, per_device_train_batch_size=size, max_steps=6)
    events: list[int] = []

    class Begins(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            events.append(state.global_step)

    tight = Trainer(Peckish(5), args, train_dataset=Points(40), callbacks=[Begins])
    tight.train()
    assert args.per_device_train_batch_size <= 5
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == size
    assert events == list(range(6))
    plain = settings(tmp_path, per_device_train_batch_size=size, max_steps=6)
    ample = Trainer(Regression(), plain, train_dataset=Points(40))
    ample.train()
    assert losses(tight) == pytest.approx(losses(ample), rel=1e-5)


class RunsOut(torch.autograd.Function):
    """Memory is short in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


class PeckishBackwards(Peckish):
    """Runs out in the loss's backward, or (`deep`) not before that of the first layer."""

    def __init__(self, room: int, deep: bool) -> None:
        super().__init__(room)
        self.deep = deep

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.forwards += 1
        tight = self.forwards > 3 and len(x) > self.room
        hidden = self.layers[0](x)
        if tight and self.deep:
            hidden = RunsOut.apply(hidden)
        loss = (self.layers[1:](hidden).squeeze(-1) - labels).square().mean()
        return {"loss": RunsOut.apply(loss) if tight and not self.deep else loss}


MODELS = {
    "in forward": Peckish,
    "in backward": lambda room: PeckishBackwards(room, deep=True),
    "before backward gets to the model": lambda room: PeckishBackwards(room, deep=False),
}


def run_out(rank: int, world_size: int, folder: Path, tight_ranks: list[int], streamed: bool) -> Any:
    data: Any = Flow(64) if streamed else Points(64)
    found = {}
    for accumulation in (1, 2):
        shape = {"per_device_train_batch_size": 8 // accumulation, "max_steps": 6}
        shape["gradient_accumulation_steps"] = accumulation
        ample = Trainer(Regression(), settings(folder, **shape), train_dataset=data)
        ample.train()
        for where, model in MODELS.items():
            args = settings(folder, auto_find_batch_size=True, **shape)
            tight = Trainer(model(2 if rank in tight_ranks else 99), args, train_dataset=data)
            tight.train()
            same = losses(tight) == pytest.approx(losses(ample), rel=1e-5)
            found[where, accumulation] = (args.per_device_train_batch_size, same)
    return found


@pytest.mark.parametrize(
    ("tight_ranks", "streamed"), [([0], False), ([1], True), ([0, 1], False)], ids=["first", "last", "all"]
)
def test_a_rank_that_runs_out_takes_all_along(tmp_path: Path, tight_ranks: list[int], streamed: bool) -> None:
    for found in run_ranks(run_out, 2, tmp_path, tight_ranks, streamed, backend=None):
        assert set(found.values()) == {(2, True)}, found


def raise_on_one(rank: int, world_size: int, folder: Path) -> str:
    class Wrong(Peckish):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            outputs = super().forward(x, labels)
            if self.forwards == 3 and rank == 1:
                outputs["logits"].register_hook(lambda gradient: gradient.reshape(7))
            return outputs

    args = settings(folder, auto_find_batch_size=True, max_steps=6, ddp_timeout=10)
    try:
        Trainer(Wrong(99), args, train_dataset=Points(64)).train()
    except Exception as error:
        return type(error).__name__
    return "trained"


def test_what_is_not_memory_ends_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(raise_on_one, 2, tmp_path, backend=None) == ["PeerFailedError", "RuntimeError"]


def test_another_error_amid_training_is_not_taken_for_it(tmp_path: Path) -> None:
    class Wrong(Peckish):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            if self.forwards == 2:
                raise RuntimeError("shapes do not match")
            return super().forward(x, labels)

    with pytest.raises(RuntimeError, match="shapes"):
        Trainer(
            Wrong(9), settings(tmp_path, auto_find_batch_size=True, max_steps=4), train_dataset=Points(64)
        ).train()
