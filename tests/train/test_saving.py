"""Checkpoints are written while training goes on, and say so when they cannot be."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.checkpoint import contents
from paceline.checkpoint.background import BackgroundWriter
from paceline.checkpoint.snapshot import to_memory
from paceline.train import checkpoints
from paceline.train.callbacks import TrainerCallback
from paceline.train.trainer import Trainer
from tests.ranks import rank_outcomes, run_ranks
from tests.train.models import Points, Regression, settings, weights

LONGEST_WAIT = 30.0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds every checkpoint's last step, sealing it, until it is set."""
    opened, seal = threading.Event(), contents.seal

    def held(*args: Any, **kwargs: Any) -> None:
        assert opened.wait(LONGEST_WAIT)
        seal(*args, **kwargs)

    monkeypatch.setattr(contents, "seal", held)
    yield opened
    opened.set()


class At(TrainerCallback):
    """Calls a function at the end of one step."""

    def __init__(self, step: int, function: Any) -> None:
        self.step, self.function = step, function

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.function()


def test_training_goes_on_while_the_checkpoint_is_written(tmp_path: Path, gate: threading.Event) -> None:
    steps_taken = []

    def look() -> None:
        steps_taken.append(contents.list_checkpoints(tmp_path))
        gate.set()

    args = settings(tmp_path, max_steps=6, save_strategy="steps", save_steps=3)
    Trainer(Regression(), args, train_dataset=Points(40), callbacks=[At(5, look)]).train()
    assert steps_taken == [[]], "step 5 is reached before checkpoint-3 is complete"
    assert contents.newest_complete(tmp_path).found == tmp_path / "checkpoint-6"
    assert contents.flaw(tmp_path / "checkpoint-3") is None


def test_the_checkpoint_is_of_its_own_step(tmp_path: Path, gate: threading.Event) -> None:
    """Neither weights nor optimizer nor log history move while they wait to be written."""
    now: dict[str, Any] = {}

    def remember() -> None:
        now.update(weights(trainer.model))
        now["moments"] = [state["exp_avg"].clone() for state in trainer.optimizer.state.values()]

    args = settings(tmp_path, max_steps=6, save_strategy="steps", save_steps=3, optim="adamw_torch")
    callbacks = [At(3, remember), At(6, gate.set)]
    trainer = Trainer(Regression(), args, train_dataset=Points(40), callbacks=callbacks)
    trainer.train()
    saved = Regression()
    Trainer(saved, args)._load_from_checkpoint(str(tmp_path / "checkpoint-3"))
    assert all(torch.equal(now[name], value) for name, value in weights(saved).items())
    optimizer = torch.load(tmp_path / "checkpoint-3" / "optimizer.pt")["state"]
    assert all(torch.equal(a, optimizer[i]["exp_avg"]) for i, a in enumerate(now["moments"]))
    state = checkpoints.TrainerState.load_from_json(tmp_path / "checkpoint-3" / "trainer_state.json")
    assert (state.global_step, len(state.log_history)) == (3, 3)


def test_who_looks_at_on_save_finds_it_complete(tmp_path: Path) -> None:
    class Looks(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert contents.flaw(tmp_path / f"checkpoint-{state.global_step}") is None
            seen.append(state.global_step)

    seen: list[int] = []
    args = settings(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    Trainer(Regression(), args, train_dataset=Points(40), callbacks=[Looks]).train()
    assert seen == [2, 4]


def test_what_a_subclass_saves_is_in_the_checkpoint(tmp_path: Path) -> None:
    class Adds(Trainer):
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            Path(str(output_dir), "mine.txt").write_text("mine")

        def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
            assert model is self.model_wrapped
            super()._save_checkpoint(model, trial)
            calls.append(self.state.global_step)

    calls: list[int] = []
    args = settings(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    Adds(Regression(), args, train_dataset=Points(40)).train()
    manifest = contents.read_manifest(tmp_path / "checkpoint-2")
    assert calls == [2]
    assert manifest is not None and "mine.txt" in manifest.files


def fail_in_the_writer(rank: int, world_size: int, folder: Path) -> list[int]:
    """The disk is full when checkpoint-2 is written, in the background."""
    steps: list[int] = []

    class Counts(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append(state.global_step)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    contents.seal = full  # this process is the test's own
    args = settings(folder, max_steps=50, save_strategy="steps", save_steps=2)
    Trainer(Regression(), args, train_dataset=Points(20), callbacks=[Counts]).train()
    return steps


def test_a_full_disk_behind_trainings_back_ends_all_ranks(tmp_path: Path) -> None:
    writer, other = rank_outcomes(fail_in_the_writer, 2, tmp_path, backend=None)
    assert "No space left on device" in str(writer.error)
    assert "PeerFailedError: rank 1 waited for rank 0 (saving" in str(other.error)
    assert "checkpoint-2" in str(other.error)
    assert not list(tmp_path.iterdir())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight


def test_a_copy_in_memory_keeps_ties_and_nothing_else() -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.first(torch.ones(3)).sum().backward()
    optimizer.step()
    copied = to_memory({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert copied["model"]["first.weight"] is copied["model"]["second.weight"]
    assert copied["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    for name, value in model.state_dict().items():
        assert torch.equal(copied["model"][name], value)
        assert copied["model"][name].data_ptr() != value.data_ptr()


def test_a_writer_tells_once_what_went_wrong() -> None:
    writer, begun, go = BackgroundWriter(), threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        assert go.wait(LONGEST_WAIT)
        raise OSError("full")

    writer.start(job)
    assert begun.wait(LONGEST_WAIT)
    assert not writer.failed
    go.set()
    with pytest.raises(OSError, match="full"):
        writer.wait()
    writer.wait()
    assert not writer.failed


def save_in_both_ways(rank: int, world_size: int, folder: Path) -> None:
    class Waits(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Its presence makes the checkpoint be written at once."""

    for name, callbacks in (("behind", []), ("at_once", [Waits])):
        args = settings(folder / name, max_steps=3, save_strategy="steps", save_steps=3, optim="adamw_torch")
        Trainer(Regression(), args, train_dataset=Points(40), callbacks=callbacks).train()


def test_a_checkpoint_written_behind_is_the_one_written_at_once(tmp_path: Path) -> None:
    run_ranks(save_in_both_ways, 2, tmp_path, backend=None)
    behind, at_once = (
        contents.read_manifest(tmp_path / name / "checkpoint-3") for name in ("behind", "at_once")
    )
    assert behind is not None and at_once is not None
    for name in ("model.safetensors", "scheduler.pt"):
        assert behind.files[name] == at_once.files[name], name
    assert set(behind.files) == set(at_once.files)
    assert behind.progress == at_once.progress


def save_on_each_machine(rank: int, world_size: int, folder: Path) -> None:
    """Each rank is the first of its machine, and both machines see one output folder."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    args = settings(
        folder, save_strategy="steps", save_steps=1, max_steps=12, save_total_limit=2, save_on_each_node=True
    )
    trainer = Trainer(Regression(), args, train_dataset=Points(21))
    trainer.train()


def test_machines_may_share_a_folder(tmp_path: Path) -> None:
    run_ranks(save_on_each_machine, 2, tmp_path)
    names = [name for name in sorted(os.listdir(tmp_path)) if "checkpoint" in name]
    assert names == ["checkpoint-11", "checkpoint-12"]
    assert contents.flaw(tmp_path / "checkpoint-12") is None
