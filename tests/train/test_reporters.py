"""TensorBoard, Weights & Biases, MLflow and Trackio get the logs, by their own libraries, on rank 0."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from paceline.errors import ArgumentError
from paceline.train import reporters
from paceline.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.models import Points, Regression, settings


def train(folder: Path, **changes: Any) -> None:
    args = settings(folder, max_steps=2, eval_strategy="steps", eval_steps=2, run_name="mine", **changes)
    Trainer(Regression(), args, train_dataset=Points(8), eval_dataset=Points(4)).train()


def train_with_tensorboard(rank: int, world_size: int, folder: Path) -> None:
    train(folder, report_to="tensorboard")


def test_tensorboard_files_hold_the_logs(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_ranks(train_with_tensorboard, 2, tmp_path, backend=None)
    (folder,) = (tmp_path / "runs").iterdir()
    events = reading.EventAccumulator(str(folder))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2]
    assert {"train/learning_rate", "train/grad_norm", "eval/loss", "train/train_loss"} <= set(
        events.Tags()["scalars"]
    )
    assert "args/text_summary" in events.Tags()["tensors"]


class Calls(ModuleType):
    """Stands in for a service's library: notes every call, in order."""

    def __init__(self, name: str, **attributes: Any) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


def test_wandb_gets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Calls("wandb", run=None, config=SimpleNamespace(update=lambda *args, **kwargs: None))
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.setattr(reporters, "_installed", lambda name: True)
    monkeypatch.setenv("WANDB_PROJECT", "here")
    train(tmp_path, report_to=["wandb"])
    assert library.named("init") == [((), {"project": "here", "name": "mine"})]
    logged = [args[0] for args, _ in library.named("log")]
    assert [each["train/global_step"] for each in logged] == [1, 2, 2, 2]
    assert "train/loss" in logged[0]
    assert "eval/loss" in logged[2]
    assert library.calls[-1][0] == "finish"


def test_mlflow_gets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Calls("mlflow", active_run=lambda: None)
    monkeypatch.setitem(sys.modules, "mlflow", library)
    monkeypatch.setattr(reporters, "_installed", lambda name: True)
    train(tmp_path, report_to="mlflow")
    assert library.named("start_run") == [((), {"run_name": "mine"})]
    assert all(len(args[0]) <= 100 for args, _ in library.named("log_params"))
    parameters = {name for args, _ in library.named("log_params") for name in args[0]}
    assert {"learning_rate", "per_device_train_batch_size"} <= parameters
    steps = [kwargs["step"] for _, kwargs in library.named("log_metrics")]
    assert steps == [1, 2, 2, 2]
    assert library.calls[-1][0] == "end_run"


def test_trackio_gets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Calls("trackio")
    monkeypatch.setitem(sys.modules, "trackio", library)
    monkeypatch.setattr(reporters, "_installed", lambda name: True)
    train(tmp_path, report_to="trackio", project="digits")
    ((_, settings_of_run),) = library.named("init")
    assert (settings_of_run["project"], settings_of_run["name"]) == ("digits", "mine")
    assert settings_of_run["config"]["learning_rate"] == 0.1
    logged = [args[0] for args, _ in library.named("log")]
    assert [each["train/global_step"] for each in logged] == [1, 2, 2, 2]
    assert "eval/loss" in logged[2]
    assert library.calls[-1][0] == "finish"


def train_with_trackio(rank: int, world_size: int, folder: Path) -> None:
    train(folder, report_to="trackio", project="digits")


def test_trackio_itself_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run_ranks(train_with_trackio, 2, tmp_path, backend=None)
    assert list((tmp_path / "trackio").glob("digits*"))


def test_a_service_that_is_not_installed_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporters, "_installed", lambda name: name == "mlflow")
    with pytest.raises(ArgumentError, match="pip install wandb"):
        settings(tmp_path, report_to="wandb")
    assert settings(tmp_path, report_to="all").report_to == ["mlflow"]


def test_nothing_is_imported_that_nobody_asked_for(tmp_path: Path) -> None:
    names = {"tensorboard", "wandb", "mlflow", "trackio"} - set(sys.modules)
    settings(tmp_path)
    assert not names & set(sys.modules)
