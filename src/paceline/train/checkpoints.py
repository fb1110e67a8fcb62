"""Saving a run, and going on from where it was saved.

    find -> load_weights -> (model is wrapped, optimizer is made) -> load_progress
    save -> note_best -> keep_newest

One rank writes (one of each machine with save_on_each_node); the others wait as long as
it lives. What to resume from is found on rank 0, and all ranks take that. Random numbers
need no place in a checkpoint: they are a function of the seed and the step.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.checkpoint import contents
from paceline.checkpoint.atomic import remove_leftovers, whole_folder
from paceline.checkpoint.model_files import load_model
from paceline.environment import rank_place
from paceline.errors import ArgumentError, CheckpointError
from paceline.train.state import TrainerState
from paceline.train.turns import Turns

if TYPE_CHECKING:
    from paceline.train.arguments import TrainingArguments
    from paceline.train.trainer import Trainer

logger = logging.getLogger(__name__)

STATE_NAME = "trainer_state.json"
OPTIMIZER_NAME = "optimizer.pt"
SCHEDULE_NAME = "scheduler.pt"


def save(trainer: Trainer, progress: dict[str, Any]) -> Path:
    """Write ``checkpoint-<global_step>``, whole or not at all; returns when it is there, on every rank.

    Raises:
        OSError: the writing rank could not write; what was there before is as it was.
        PeerFailedError: on the ranks that waited for it.
    """
    args, output_dir = trainer.args, Path(str(trainer.args.output_dir))
    folder = output_dir / f"checkpoint-{trainer.state.global_step}"
    if trainer.state.best_global_step == trainer.state.global_step:
        trainer.state.best_model_checkpoint = str(folder)
    first = args.process_index - rank_place().local_rank if args.save_on_each_node else 0
    with Turns().first(first, f"saving {folder}"):
        if args.should_save:
            _write(trainer, folder, progress)
            _tidy(trainer, output_dir)
    return folder


def find(trainer: Trainer, resume: str | bool | None) -> Path | None:
    """The folder to resume from, the same on every rank; None to start afresh.

    Args:
        trainer: whose output_dir is searched.
        resume: a folder; True for the newest complete checkpoint; None or False.

    Raises:
        CheckpointError: there is none, or the named one is not complete.
    """
    if resume is None or resume is False:
        return None
    if resume is True:
        return _find_newest(trainer, Path(str(trainer.args.output_dir)))
    folder = Path(resume)
    reason = Turns().on_rank_zero(lambda: _flaw_of_named(folder), f"checking {folder}")
    if reason is not None:
        raise CheckpointError(f"cannot resume from {folder}: {reason}")
    return folder


def load_weights(trainer: Trainer, folder: Path) -> None:
    """Read the model's weights, before it is wrapped."""
    load_model(trainer.model, folder)


def load_progress(trainer: Trainer, folder: Path) -> tuple[TrainerState, dict[str, Any]]:
    """Read optimizer and schedule.

    Returns:
        the state, and what `save` was given as progress; that is empty if another tool wrote the folder.

    Raises:
        CheckpointError: the folder holds a model alone.
    """
    if not (folder / OPTIMIZER_NAME).is_file():
        raise CheckpointError(
            f"{folder} has no {OPTIMIZER_NAME} (save_only_model?), so training cannot go on from it"
        )
    for name, target in ((OPTIMIZER_NAME, trainer.optimizer), (SCHEDULE_NAME, trainer.lr_scheduler)):
        target.load_state_dict(torch.load(folder / name, map_location=trainer.args.device, weights_only=True))
    manifest = contents.read_manifest(folder)
    progress = manifest.progress if manifest is not None else {}
    return TrainerState.load_from_json(folder / STATE_NAME), progress


def load_best(trainer: Trainer) -> None:
    """Read the weights of the checkpoint that is the best for rank 0 into the model."""
    best = Turns().on_rank_zero(lambda: trainer.state.best_model_checkpoint, "choosing the best checkpoint")
    logger.info("loading the best model, from %s", best)
    if best is not None:
        load_model(trainer.model, Path(best))


def note_best(trainer: Trainer, metrics: dict[str, float]) -> bool:
    """Whether these metrics are the best so far; notes them in the state if so.

    Raises:
        ArgumentError: metric_for_best_model is not among them.
    """
    args, state = trainer.args, trainer.state
    if args.metric_for_best_model is None:
        return False
    value, best = metric_of(args, metrics), state.best_metric
    better = best is None or (value > best if args.greater_is_better else value < best)
    if not better or math.isnan(value):
        return False
    state.best_metric, state.best_global_step = value, state.global_step
    return True


def metric_of(args: TrainingArguments, metrics: dict[str, float]) -> float:
    """The value of metric_for_best_model.

    Raises:
        ArgumentError: it is not among `metrics`.
    """
    name = str(args.metric_for_best_model)
    name = name if name.startswith("eval_") else f"eval_{name}"
    if name not in metrics:
        raise ArgumentError(
            f"metric_for_best_model is {name!r}, but the metrics are {', '.join(sorted(metrics))}"
        )
    return metrics[name]


def _write(trainer: Trainer, folder: Path, progress: dict[str, Any]) -> None:
    with whole_folder(folder) as aside:
        trainer.save_model(str(aside), _internal_call=True)
        if not trainer.args.save_only_model:
            torch.save(trainer.optimizer.state_dict(), aside / OPTIMIZER_NAME)
            torch.save(trainer.lr_scheduler.state_dict(), aside / SCHEDULE_NAME)
        trainer.state.save_to_json(aside / STATE_NAME)
        contents.seal(aside, trainer.state.global_step, trainer.args.world_size, progress)


def _tidy(trainer: Trainer, output_dir: Path) -> None:
    best = trainer.state.best_model_checkpoint
    for folder in contents.keep_newest(
        output_dir, trainer.args.save_total_limit, Path(best) if best else None
    ):
        logger.info("deleted %s (save_total_limit=%s)", folder, trainer.args.save_total_limit)
    remove_leftovers(output_dir, "checkpoint-")


def _find_newest(trainer: Trainer, output_dir: Path) -> Path:
    search = Turns().on_rank_zero(lambda: contents.newest_complete(output_dir), f"searching {output_dir}")
    skipped = "; ".join(f"{folder.name} is not complete: {reason}" for folder, reason in search.skipped)
    if search.found is None:
        raise CheckpointError(f"no complete checkpoint in {output_dir}" + (f": {skipped}" if skipped else ""))
    if skipped and trainer.is_world_process_zero():
        logger.warning("%s; resuming from %s", skipped, search.found.name)
    return search.found


def _flaw_of_named(folder: Path) -> str | None:
    """Why a folder that the user named cannot be resumed from; one without a manifest is taken on trust."""
    if not folder.is_dir():
        return "there is no such folder"
    if not (folder / contents.MANIFEST).is_file():
        return None if (folder / STATE_NAME).is_file() else f"it has no {STATE_NAME}"
    return contents.flaw(folder)
