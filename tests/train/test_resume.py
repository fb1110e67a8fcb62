"""A run that stops can go on: bit-exact on as many ranks, equal to rounding on other ranks."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.checkpoint import contents
from paceline.errors import CheckpointError
from paceline.train.callbacks import TrainerCallback
from paceline.train.trainer import Trainer
from tests.ranks import rank_outcomes, run_ranks
from tests.train.models import Points, Regression, losses, settings, weights


def train(folder: Path, resume: str | bool | None = None, **changes: Any) -> Trainer:
    """Dropout, augmentation, accumulation and a schedule; on one rank five steps an epoch, on two three."""
    values = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "optim": "adamw_torch",
        "lr_scheduler_type": "cosine",
        "max_steps": 8,
        "logging_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        **changes,
    }
    args = settings(folder, **values)
    trainer = Trainer(Regression(dropout=0.3), args, train_dataset=Points(20, noise=0.5))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def train_and_resume(rank: int, world_size: int, folder: Path, workers: int) -> tuple[Any, Any]:
    """An undisturbed run, and one that goes on from the undisturbed one's second checkpoint."""
    whole = train(folder / "whole", dataloader_num_workers=workers)
    again = train(folder / "again", str(folder / "whole" / "checkpoint-4"), dataloader_num_workers=workers)
    return tuple((weights(trainer.model), losses(trainer)) for trainer in (whole, again))


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 0), (2, 1)])
def test_is_bit_exact_in_the_middle_of_an_epoch(tmp_path: Path, world_size: int, workers: int) -> None:
    for whole, again in run_ranks(train_and_resume, world_size, tmp_path, workers, backend=None, timeout=60):
        assert all(torch.equal(whole[0][name], again[0][name]) for name in whole[0])
        assert whole[1] == pytest.approx(again[1], rel=1e-6)


def quiet(rank: int, world_size: int, folder: Path, steps: int, resume: bool) -> dict[str, Tensor]:
    """Without dropout and augmentation, which differ by rank; eight samples a step on any number of ranks."""
    args = settings(
        folder,
        per_device_train_batch_size=8 // world_size,
        max_steps=steps,
        save_strategy="steps",
        save_steps=2,
        optim="adamw_torch",
    )
    trainer = Trainer(Regression(), args, train_dataset=Points(21))
    trainer.train(resume_from_checkpoint=resume)
    return weights(trainer.model)


def test_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    (want,) = run_ranks(quiet, 1, tmp_path / "one", 8, False, backend=None)
    run_ranks(quiet, 2, tmp_path / "mixed", 4, False, backend=None)
    for final in run_ranks(quiet, 4, tmp_path / "mixed", 8, True, backend=None):
        for name, value in want.items():
            torch.testing.assert_close(final[name], value, rtol=1e-4, atol=1e-6)


def test_another_global_batch_or_data_set_is_refused(tmp_path: Path) -> None:
    train(tmp_path, max_steps=2)
    with pytest.raises(CheckpointError, match="global batch of 4 samples, but now it is 8"):
        train(tmp_path, True, gradient_accumulation_steps=4)
    longer = Trainer(
        Regression(),
        settings(tmp_path, per_device_train_batch_size=4, optim="adamw_torch"),
        train_dataset=Points(24),
    )
    with pytest.raises(CheckpointError, match="training set of 20 samples, but now it has 24"):
        longer.train(resume_from_checkpoint=True)


def test_numbers_go_on_after_resuming(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", logging_steps=3)
    state = json.loads((tmp_path / "whole" / "checkpoint-4" / "trainer_state.json").read_text())
    assert (state["global_step"], state["epoch"]) == (4, 0.8)
    again = train(tmp_path / "again", str(tmp_path / "whole" / "checkpoint-4"), logging_steps=3)
    assert losses(again) == pytest.approx(losses(whole), rel=1e-6)
    totals = [trainer.state.log_history[-1]["train_loss"] for trainer in (whole, again)]
    assert totals[0] == pytest.approx(totals[1], rel=1e-6)


def test_a_finished_run_takes_no_further_step(tmp_path: Path) -> None:
    whole = train(tmp_path)
    again = train(tmp_path, True)
    assert again.state.global_step == 8
    assert all(torch.equal(weights(whole.model)[name], value) for name, value in weights(again.model).items())


class ShortEpochs(TrainerCallback):
    """Ends each epoch after two steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step % 2 == 0


def test_resuming_knows_of_epochs_that_ended_early(tmp_path: Path) -> None:
    def run(folder: Path, resume: str | None = None) -> Trainer:
        args = settings(folder, max_steps=5, save_strategy="steps", save_steps=1)
        trainer = Trainer(Regression(), args, train_dataset=Points(20), callbacks=[ShortEpochs])
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(tmp_path / "whole")
    for step in (2, 3, 4):
        again = run(tmp_path / f"from{step}", str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert losses(again) == pytest.approx(losses(whole), rel=1e-6)
        assert again.state.epoch == whole.state.epoch


def test_a_run_that_ended_inside_an_epoch_can_be_prolonged(tmp_path: Path) -> None:
    def run(steps: int, resume: bool = False) -> Trainer:
        args = settings(tmp_path / str(resume), max_steps=steps, save_strategy="epoch")
        trainer = Trainer(Regression(), args, train_dataset=Points(21))
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(8)
    shutil.rmtree(tmp_path)
    run(4, resume=False)
    (tmp_path / "False").rename(tmp_path / "True")
    assert losses(run(8, resume=True)) == pytest.approx(losses(whole), rel=1e-6)


def test_true_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        train(tmp_path, True)


def test_a_torn_folder_is_named_when_it_was_asked_for(tmp_path: Path) -> None:
    train(tmp_path, max_steps=2)
    os.truncate(tmp_path / "checkpoint-2" / "optimizer.pt", 100)
    with pytest.raises(CheckpointError, match=r"optimizer.pt has 100 bytes instead of"):
        train(tmp_path, str(tmp_path / "checkpoint-2"))
    with pytest.raises(CheckpointError, match="no such folder"):
        train(tmp_path, str(tmp_path / "checkpoint-9"))


def test_what_was_skipped_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, max_steps=4)
    (tmp_path / "checkpoint-4" / "model.safetensors").unlink()
    assert train(tmp_path, True).state.global_step == 8
    assert (
        "checkpoint-4 is not complete: model.safetensors is missing; resuming from checkpoint-2"
        in caplog.text
    )


def test_save_total_limit_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    trainer = Trainer(
        Regression(),
        settings(
            tmp_path,
            max_steps=6,
            learning_rate=0.0,
            save_strategy="steps",
            save_steps=1,
            save_total_limit=2,
            eval_strategy="steps",
            eval_steps=1,
            load_best_model_at_end=True,
        ),
        train_dataset=Points(21),
        eval_dataset=Points(9),
    )
    trainer.train()
    assert trainer.state.best_global_step == 1  # it never gets better with a learning rate of zero
    assert [folder.name for folder in contents.list_checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-6"]


def fail_to_write(rank: int, world_size: int, folder: Path) -> None:
    """A run whose writing rank meets a full disk at its second checkpoint."""

    class FullDisk(Trainer):
        def _save(self, output_dir: str) -> None:
            if self.state.global_step == 4:
                raise OSError(28, "No space left on device")
            super()._save(output_dir)

    args = settings(folder, max_steps=6, save_strategy="steps", save_steps=2)
    FullDisk(Regression(), args, train_dataset=Points(20)).train()


def test_a_full_disk_ends_all_ranks_and_spares_what_is_there(tmp_path: Path) -> None:
    writer, other = rank_outcomes(fail_to_write, 2, tmp_path, backend=None)
    assert "checkpoint-4 could not be written (OSError: [Errno 28] No space left on device)" in str(
        writer.error
    )
    assert "PeerFailedError: rank 1 waited for rank 0 (saving" in str(other.error)
    assert os.listdir(tmp_path) == ["checkpoint-2"]
    assert contents.flaw(tmp_path / "checkpoint-2") is None


SCRIPT = """
import sys
from pathlib import Path
from tests.train.test_resume import train, weights
import torch
resume = any(Path(sys.argv[1]).glob("checkpoint-*"))
trainer = train(Path(sys.argv[1]), resume, max_steps=30, save_steps=3, save_total_limit=3)
if trainer.is_world_process_zero():
    torch.save(weights(trainer.model), sys.argv[1] + ".done")
"""


def launch(folder: Path) -> subprocess.Popen[bytes]:
    """The script on two ranks, in a session of its own."""
    root = Path(__file__).parents[2]
    script = folder.with_suffix(".py")
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline", "launch", "--num_processes", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([*command, str(folder)], env=environment, start_new_session=True, **quiet)  # type: ignore[call-overload, no-any-return]


def descendants(pid: int) -> list[int]:
    """Living processes below `pid`; the launcher gives each rank a session of its own."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            parent = (
                int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) if entry.name.isdigit() else 0
            )
        except OSError:
            continue
        if parent == pid:
            found += [int(entry.name), *descendants(int(entry.name))]
    return found


def newest_step(folder: Path) -> int:
    return max([0, *map(contents.step_of, contents.list_checkpoints(folder))])


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    for pid in [process.pid, *descendants(process.pid)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait(10)


@pytest.mark.parametrize("best_first", [True, False])
def test_of_a_single_checkpoint_to_keep_the_best_stays(tmp_path: Path, best_first: bool) -> None:
    scores = iter([3.0, 1.0, 2.0] if best_first else [1.0, 2.0, 3.0])
    args = settings(
        tmp_path, max_steps=3, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
        save_total_limit=1, metric_for_best_model="score", load_best_model_at_end=True,
    )  # fmt: skip
    trainer = Trainer(
        Regression(), args, train_dataset=Points(24), eval_dataset=Points(4),
        compute_metrics=lambda _: {"score": next(scores)},
    )  # fmt: skip
    trainer.train()
    left = [each.name for each in contents.list_checkpoints(tmp_path)]
    assert left == [f"checkpoint-{1 if best_first else 3}"]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, []),
        ({"learning_rate": 0.5}, ["learning_rate=0.5 (was 0.1)", "the optimizer's state brings its own"]),
        ({"seed": 8, "max_steps": 5}, ["seed=8 (was 7)", "max_steps=5 (was 4)", "some may come twice"]),
    ],
)
def test_changed_arguments_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], wanted: list[str]
) -> None:
    first = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    Trainer(Regression(), settings(tmp_path, **first), train_dataset=Points(24)).train()
    caplog.clear()
    again = Trainer(Regression(), settings(tmp_path, **(first | changes)), train_dataset=Points(24))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    said = [each.getMessage() for each in caplog.records if "other arguments" in each.getMessage()]
    assert len(said) == bool(wanted)
    assert all(words in said[0] for words in wanted)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_killed_at_any_moment_it_comes_to_the_same_end(tmp_path: Path) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    assert launch(undisturbed).wait(60) == 0
    for _ in range(3):
        process = launch(killed)
        try:
            before, deadline = newest_step(killed), time.monotonic() + 60
            while newest_step(killed) <= before and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(random.uniform(0, 0.05))
        finally:
            kill_tree(process)
        assert contents.newest_complete(killed).found is not None
    assert launch(killed).wait(60) == 0
    want, got = (torch.load(folder.with_suffix(".done")) for folder in (undisturbed, killed))
    assert all(torch.equal(want[name], got[name]) for name in want)
