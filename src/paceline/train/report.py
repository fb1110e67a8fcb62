"""The page that shows a run: ``report.html`` in the output folder, one file, nothing fetched, no scripts."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
import platform
from collections.abc import Sequence
from dataclasses import MISSING, fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.checkpoint.atomic import write_text
from paceline.train import charts
from paceline.train.clock import PHASES
from paceline.train.state import TrainerState

if TYPE_CHECKING:
    from paceline.train.arguments import TrainingArguments
    from paceline.train.run import Run

NAME = "report.html"

_CURVES = {"loss": "Training loss", "learning_rate": "Learning rate", "grad_norm": "Gradient norm"}
_SPEED_WORDS = ("_runtime", "_per_second", "_time")
_LIBRARIES = ("paceline", "torch", "transformers", "datasets", "numpy")


def write(run: Run, metrics: dict[str, Any]) -> None:
    """Write the page on rank 0; every rank takes part, to say where its time went.

    Args:
        run: at its end.
        metrics: the totals that training logs last.
    """
    trainer = run.trainer
    own = torch.tensor(run.clock.shares(), dtype=torch.float32, device=trainer.args.device)
    of_ranks = trainer.collectives.gather(own, "gathering the ranks' times").tolist()
    if trainer.args.process_index != 0:
        return
    values = {
        "name": Path(str(trainer.args.output_dir)).resolve().name,
        "model": _model_words(trainer.model),
        "ended": f"ended {datetime.now():%Y-%m-%d %H:%M}",
        "facts": _facts(trainer.state, trainer.args, metrics),
        "charts": curves(trainer.state.log_history, run.speeds),
        "ranks": [_percent(seconds) for seconds in of_ranks],
        **_arguments(trainer.args),
        "versions": _versions(trainer.args),
    }
    folder = Path(str(trainer.args.output_dir))
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / NAME, render(values))


def render(values: dict[str, Any]) -> str:
    """The page as text; what comes from outside is escaped."""
    template = importlib.resources.files("paceline.train").joinpath("report.html.jinja").read_text()
    environment = importlib.import_module("jinja2").Environment(autoescape=True)
    sizes = {"width": charts.WIDTH, "height": charts.HEIGHT, "left": charts.LEFT, "right": charts.RIGHT}
    return str(environment.from_string(template).render(**values, phases=PHASES, **sizes))


def curves(history: list[dict[str, Any]], speeds: Sequence[tuple[float, float]]) -> list[charts.Chart]:
    """Charts of what was logged.

    Args:
        history: the state's log_history.
        speeds: (step, samples per second since the log before).
    """
    made = [charts.chart(title, {name: _series(history, name)}) for name, title in _CURVES.items()]
    made.append(charts.chart("Samples per second", {"samples/s": speeds}))
    names = sorted({name for entry in history for name in entry if _is_evaluation(name)})
    made += [charts.chart(name, {name: _series(history, name)}) for name in names]
    return [each for each in made if each is not None]


def _series(history: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    return [
        (float(entry["step"]), float(entry[name]))
        for entry in history
        if isinstance(entry.get(name), (int, float)) and "step" in entry
    ]


def _is_evaluation(name: str) -> bool:
    return name.startswith("eval_") and not name.endswith(_SPEED_WORDS)


def _model_words(model: torch.nn.Module) -> str:
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__} with {count:,} parameters"


def _facts(state: TrainerState, args: TrainingArguments, metrics: dict[str, Any]) -> list[tuple[str, str]]:
    facts = [
        ("steps", f"{state.global_step:,}"),
        ("epochs", f"{state.epoch:.4g}"),
        ("ranks", str(args.world_size)),
        ("time", str(timedelta(seconds=round(metrics["train_runtime"])))),
        ("samples per second", charts.as_text(metrics["train_samples_per_second"])),
        ("mean loss", charts.as_text(metrics["train_loss"])),
    ]
    if state.best_metric is not None:
        facts.append((f"best {args.metric_for_best_model}", charts.as_text(state.best_metric)))
    return facts


def _percent(seconds: Sequence[float]) -> list[float]:
    total = sum(seconds) or 1.0
    return [100.0 * each / total for each in seconds]


def _arguments(args: TrainingArguments) -> dict[str, list[tuple[str, str]]]:
    values = args.to_dict()
    changed: list[tuple[str, str]] = []
    unchanged: list[tuple[str, str]] = []
    for each in fields(args):
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        place = unchanged if values[each.name] == default else changed
        place.append((each.name, str(values[each.name])))
    return {"changed": changed, "unchanged": unchanged}


def _versions(args: TrainingArguments) -> list[tuple[str, str]]:
    found = [("Python", platform.python_version())]
    for name in _LIBRARIES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    device = torch.get_device_module(args.device).get_device_name() if args.n_gpu else platform.machine()
    return [*found, ("system", platform.platform()), ("device", device), ("backend", args.backend_reason)]
