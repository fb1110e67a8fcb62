"""SIGTERM: a checkpoint at the end of the step, a clean end, and the next start goes on from there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.checkpoint import contents
from paceline.train.callbacks import TrainerCallback
from paceline.train.interruption import EXIT_CODE, MARK, Interruption
from paceline.train.trainer import Trainer
from tests.ranks import rank_outcomes
from tests.train.models import Points, Regression, losses, settings, weights


class Terminates(TrainerCallback):
    """Sends this rank SIGTERM in the middle of a step."""

    def __init__(self, step: int, rank: int = 0) -> None:
        self.step, self.rank = step, rank

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step - 1 and args.process_index == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)


class TellsOfTheBest(Trainer):
    """Fires an event of its own when the best model is loaded."""

    def _load_best_model(self) -> None:
        self.fire("on_load_best")
        super()._load_best_model()


def train(folder: Path, callbacks: Any = (), resume: bool | None = None, **changes: Any) -> Trainer:
    values = {"max_steps": 6, "save_strategy": "steps", "save_steps": 100, "optim": "adamw_torch", **changes}
    eval_dataset = values.pop("eval_dataset", None)
    trainer = TellsOfTheBest(
        Regression(dropout=0.2),
        settings(folder, **values),
        train_dataset=Points(21),
        eval_dataset=eval_dataset,
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_saves_leaves_and_goes_on_by_itself(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    with pytest.raises(SystemExit) as left:
        train(tmp_path / "cut", [Terminates(3)])
    assert left.value.code == EXIT_CODE == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert contents.newest_complete(tmp_path / "cut").found == tmp_path / "cut" / "checkpoint-3"
    assert json.loads((tmp_path / "cut" / MARK).read_text())["step"] == 3
    again = train(tmp_path / "cut")
    assert losses(again) == pytest.approx(losses(whole), rel=1e-6)
    assert all(torch.equal(weights(whole.model)[name], value) for name, value in weights(again.model).items())
    assert not (tmp_path / "cut" / MARK).exists()


def test_false_starts_afresh(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        train(tmp_path, [Terminates(3)])
    seen = []

    class First(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(state.global_step)

    train(tmp_path, [First], resume=False)
    assert seen == [0]


def interrupted_rank(rank: int, world_size: int, folder: Path) -> int:
    try:
        train(folder, [Terminates(2, rank=1)])
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path: Path) -> None:
    outcomes = rank_outcomes(interrupted_rank, 2, tmp_path, backend=None)
    assert [outcome.value for outcome in outcomes] == [EXIT_CODE, EXIT_CODE]
    assert [folder.name for folder in contents.list_checkpoints(tmp_path)] == ["checkpoint-2"]


class TerminatesAt(TrainerCallback):
    """Sends rank 1 SIGTERM when an event fires at a step, once."""

    def __init__(self, event: str, step: int, entry: str | None = None) -> None:
        self.entry, self.step = entry, step
        setattr(self, event, self.notice)

    def notice(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        due = self.entry is None or self.entry in state.log_history[-1]
        if due and state.global_step == self.step and args.process_index == 1:
            self.step = -1
            os.kill(os.getpid(), signal.SIGTERM)


# Name -> event, step, and what the latest entry of the log must hold. An epoch has 3 steps, the run 6.
LATE_MOMENTS: dict[str, tuple[str, int, str | None]] = {
    "the last step of an epoch": ("on_step_end", 3, None),
    "the end of an epoch": ("on_epoch_end", 3, None),
    "the last step": ("on_step_end", 6, None),
    "the last evaluation": ("on_evaluate", 6, None),
    "the last checkpoint": ("on_save", 6, None),
    "the last epoch's end": ("on_epoch_end", 6, None),
    "the last step's log": ("on_log", 6, "loss"),
    "the run's log": ("on_log", 6, "train_loss"),
    "the end of training": ("on_train_end", 6, None),
    "loading the best model": ("on_load_best", 6, None),
    "the end of training with the best model": ("on_train_end", 6, None),
}


def interrupted_late(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Where each interrupted run left off, and the weights of the run that goes on from there."""
    # "Best" is the highest loss, so that it is not the last step's.
    best = {"load_best_model_at_end": True, "greater_is_better": True, "save_total_limit": 1}

    def run(name: str, callbacks: Any = ()) -> Trainer:
        return train(
            folder / name, callbacks, eval_strategy="steps", eval_steps=3, save_steps=3,
            per_device_train_batch_size=4, eval_dataset=Points(5), **(best if "best" in name else {}),
        )  # fmt: skip

    undisturbed = ("undisturbed", "undisturbed, the best model")
    found: dict[str, Any] = {name: (6, weights(run(name).model)) for name in undisturbed}
    for name, moment in LATE_MOMENTS.items():
        with pytest.raises(SystemExit, match="143"):
            run(name, [TerminatesAt(*moment)])
        dist.barrier()  # rank 0 has left its mark
        step = json.loads((folder / name / MARK).read_text())["step"]
        dist.barrier()
        found[name] = step, weights(run(name).model)
    dist.barrier()
    assert not list(folder.glob(f"*/{MARK}"))
    assert [path.name for path in contents.list_checkpoints(folder / "loading the best model")] == [
        "checkpoint-3"
    ]
    return found


def test_wherever_it_comes_the_next_start_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    outcomes = rank_outcomes(interrupted_late, 2, tmp_path, timeout=100)
    for outcome in outcomes:
        assert outcome.returned, outcome
        (_, last), (_, best) = (
            outcome.value.pop("undisturbed"),
            outcome.value.pop("undisturbed, the best model"),
        )
        assert any(not torch.equal(last[name], best[name]) for name in last)
        for name, (step, found) in outcome.value.items():
            assert step == (3 if "an epoch" in name else 6), name
            want = best if "best" in name else last
            torch.testing.assert_close(found, want, rtol=0, atol=0, msg=name)


def test_what_cannot_be_gone_on_from_is_not_marked(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        train(tmp_path, [Terminates(3)], save_only_model=True)
    assert (tmp_path / "checkpoint-3").is_dir()
    assert train(tmp_path, save_only_model=True).state.global_step == 6


@pytest.mark.parametrize(
    ("changes", "noted"),
    [
        ({"save_strategy": "no"}, False),
        ({"save_strategy": "no", "enable_jit_checkpoint": True}, True),
        ({"save_strategy": "steps"}, True),
    ],
)
def test_when_nothing_is_saved_the_signal_keeps_its_meaning(
    tmp_path: Path, changes: dict[str, Any], noted: bool
) -> None:
    with Interruption(settings(tmp_path, **changes)):
        assert (signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL) is noted
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_scripts_own_stays(tmp_path: Path) -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        trainer = train(tmp_path, [Terminates(3)])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM]
    assert trainer.state.global_step == 6


INSISTS = """
import os, signal, sys, time
from tests.train.test_interruption import Interruption, settings
with Interruption(settings(sys.argv[1], save_strategy="steps")):
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, b"1")  # a signal that comes while Python is still forking is lost
        while True:
            time.sleep(0.02)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    print(os.waitpid(child, 0)[1], flush=True)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
"""


def test_the_second_signal_ends_at_once_and_forked_children_end_at_the_first(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"}
    done = subprocess.run(
        [sys.executable, "-c", INSISTS, str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == str(int(signal.SIGTERM)), done.stderr
    assert done.returncode == -signal.SIGTERM


LONG = """
import sys
from tests.train.test_interruption import train
train(sys.argv[1], max_steps=2000, disable_tqdm=True, logging_steps=1)
"""


@pytest.mark.slow
def test_under_the_launcher(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    script = tmp_path / "long.py"
    script.write_text(LONG)
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"}
    command = [sys.executable, "-m", "paceline", "launch", "--cpu", "--num_processes", "2", str(script)]
    with subprocess.Popen(
        [*command, str(tmp_path / "out")], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if "'loss'" in line)
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        assert process.wait(30) == 143
    found = contents.newest_complete(tmp_path / "out").found
    assert found is not None
    assert (tmp_path / "out" / MARK).is_file()
