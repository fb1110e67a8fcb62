"""Callbacks that send logs to TensorBoard, Weights & Biases, MLflow and Trackio, through their own libraries.

A library is imported when a run that asks for it begins, on rank 0 alone. Metrics have the
names that Hugging Face's callbacks give them there.
"""

from __future__ import annotations

import importlib
import numbers
import re
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.environment import mlflow_experiment, tensorboard_folder, wandb_project
from paceline.errors import ArgumentError

# Service -> the module it cannot do without.
MODULES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}

_MLFLOW_LONGEST_VALUE = 500  # of a parameter, as its servers limit it
_MLFLOW_MOST_AT_ONCE = 100
_MLFLOW_UNUSUAL = re.compile(r"[^\w\-. :/]", re.ASCII)


def names_of(report_to: str | list[str] | None) -> list[str]:
    """The services that ``report_to`` asks for; "all" means those that are installed."""
    names = [report_to] if isinstance(report_to, str) else list(report_to or [])
    if names == ["all"]:
        return [name for name in MODULES if _installed(name)]
    return [] if names == ["none"] else names


def check_installed(names: list[str]) -> None:
    """Refuse services that are unknown or not installed.

    Raises:
        ArgumentError: naming the service and how to install it.
    """
    for name in names:
        if name not in MODULES:
            raise ArgumentError(
                f"report_to={name!r} is not supported by paceline: it may be {', '.join(MODULES)}, all or "
                f"none; add a callback with on_log to send logs elsewhere"
            )
        if not _installed(name):
            raise ArgumentError(
                f"report_to={name!r}, but {MODULES[name]} is not installed; run "
                f"`pip install {MODULES[name]}`, or write report_to='none'"
            )


def callbacks_for(names: list[str]) -> list[Any]:
    """A callback for each service."""
    classes: dict[str, type[Reporter]] = {
        "tensorboard": TensorBoardCallback,
        "wandb": WandbCallback,
        "mlflow": MLflowCallback,
        "trackio": TrackioCallback,
    }
    return [classes[name]() for name in names]


class Reporter:
    """What the callbacks have in common: they act on rank 0, from on_train_begin (or the first log) on."""

    def __init__(self) -> None:
        self.started = False

    def start(self, args: Any, model: Any) -> None:
        """Open the run over there."""
        raise NotImplementedError

    def send(self, logs: dict[str, Any], step: int) -> None:
        """Send one dict of logs."""
        raise NotImplementedError

    def finish(self) -> None:
        """Close what `start` opened."""
        raise NotImplementedError

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Open the run."""
        self._start_once(args, state, model)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any], model: Any = None, **kwargs: Any
    ) -> None:
        """Send the logs."""
        if state.is_world_process_zero:
            self._start_once(args, state, model)
            self.send(logs, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the run."""
        if self.started:
            self.finish()
            self.started = False

    def _start_once(self, args: Any, state: Any, model: Any) -> None:
        if state.is_world_process_zero and not self.started:
            self.start(args, model)
            self.started = True


class TensorBoardCallback(Reporter):
    """Writes event files to ``output_dir/runs/<time>``, or to the environment's TENSORBOARD_LOGGING_DIR."""

    def start(self, args: Any, model: Any) -> None:
        """Make the writer; note arguments and the model's configuration as text."""
        folder = tensorboard_folder() or Path(args.output_dir, "runs", f"{datetime.now():%b%d_%H-%M-%S}")
        self.writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(log_dir=str(folder))
        self.writer.add_text("args", args.to_json_string())
        config: Any = getattr(model, "config", None)
        if hasattr(config, "to_json_string"):
            self.writer.add_text("model_config", config.to_json_string())

    def send(self, logs: dict[str, Any], step: int) -> None:
        """One scalar for each number."""
        for name, value in by_split(logs).items():
            if isinstance(value, str):
                self.writer.add_text(name, value, step)
            elif isinstance(value, numbers.Real):
                self.writer.add_scalar(name, float(value), step)
        self.writer.flush()

    def finish(self) -> None:
        """Close the files."""
        self.writer.close()


class WandbCallback(Reporter):
    """Logs to the run that is open, or opens one in the project WANDB_PROJECT names, called ``run_name``."""

    def start(self, args: Any, model: Any) -> None:
        """Open a run, if none is, and note arguments and configuration."""
        self.wandb = importlib.import_module("wandb")
        self.opened = self.wandb.run is None
        if self.opened:
            name = {"name": args.run_name} if args.run_name else {}
            self.wandb.init(project=wandb_project(), **name)
        self.wandb.config.update({**_config_of(model), **args.to_dict()}, allow_val_change=True)
        self.wandb.define_metric("train/global_step")
        self.wandb.define_metric("*", step_metric="train/global_step", step_sync=True)

    def send(self, logs: dict[str, Any], step: int) -> None:
        """All numbers at once."""
        self.wandb.log({**by_split(logs), "train/global_step": step})

    def finish(self) -> None:
        """Finish the run, if it was opened here."""
        if self.opened:
            self.wandb.finish()


class MLflowCallback(Reporter):
    """Logs to the active run, or starts one called ``run_name`` in the experiment MLFLOW_EXPERIMENT_NAME."""

    def start(self, args: Any, model: Any) -> None:
        """Start a run, if none is active, and note arguments and configuration as parameters."""
        self.mlflow = importlib.import_module("mlflow")
        self.opened = self.mlflow.active_run() is None
        if self.opened:
            if mlflow_experiment():
                self.mlflow.set_experiment(mlflow_experiment())
            self.mlflow.start_run(run_name=args.run_name)
        parameters = {**_config_of(model), **args.to_dict()}
        short = [
            (name, value) for name, value in parameters.items() if len(str(value)) <= _MLFLOW_LONGEST_VALUE
        ]
        for start in range(0, len(short), _MLFLOW_MOST_AT_ONCE):
            self.mlflow.log_params(dict(short[start : start + _MLFLOW_MOST_AT_ONCE]))

    def send(self, logs: dict[str, Any], step: int) -> None:
        """All numbers at once, under names that MLflow takes."""
        metrics = {
            _MLFLOW_UNUSUAL.sub("_", name): float(value)
            for name, value in logs.items()
            if isinstance(value, numbers.Real)
        }
        self.mlflow.log_metrics(metrics, step=step)

    def finish(self) -> None:
        """End the run, if it was started here."""
        if self.opened:
            self.mlflow.end_run()


class TrackioCallback(Reporter):
    """Logs to a run called ``run_name`` in ``project``, on this machine or in ``trackio_space_id``."""

    def start(self, args: Any, model: Any) -> None:
        """Open the run, and note arguments and configuration."""
        self.trackio = importlib.import_module("trackio")
        self.trackio.init(
            project=args.project,
            name=args.run_name,
            space_id=args.trackio_space_id,
            bucket_id=args.trackio_bucket_id,
            config={**_config_of(model), **args.to_dict()},
            resume="allow",
        )

    def send(self, logs: dict[str, Any], step: int) -> None:
        """All numbers at once."""
        self.trackio.log({**by_split(logs), "train/global_step": step})

    def finish(self) -> None:
        """Finish the run."""
        self.trackio.finish()


def by_split(logs: dict[str, Any]) -> dict[str, Any]:
    """The names that tools group by: eval_loss -> eval/loss, test_f1 -> test/f1, loss -> train/loss."""
    return {_by_split(name): value for name, value in logs.items()}


def _by_split(name: str) -> str:
    split, _, rest = name.partition("_")
    return f"{split}/{rest}" if split in ("eval", "test") and rest else f"train/{name}"


def _installed(name: str) -> bool:
    return find_spec(MODULES[name]) is not None


def _config_of(model: Any) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    found: dict[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}
    return found
