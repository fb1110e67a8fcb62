"""Saving a run, and going on from where it was saved.

    find -> load_weights -> (model is wrapped, optimizer is made) -> load_progress
    save -> (the writer works while training goes on) -> settle -> keep_newest

One rank writes (one of each machine with save_on_each_node). `save` copies the state to memory
and returns; a thread writes the copy. The ranks meet again in `settle`, before the next
checkpoint or the end: there a failed write is an error on all of them. Where somebody looks
at the files at once (a callback's on_save) or writes them in a way of their own (an overridden
`_save`), `save` settles before it returns.

What to resume from is found on rank 0, and all ranks take that. Random numbers need no place in
a checkpoint: they are a function of the seed and the step.
"""

from __future__ import annotations

import logging
import math
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.checkpoint import contents
from paceline.checkpoint.atomic import remove_leftovers, whole_folder
from paceline.checkpoint.background import BackgroundWriter
from paceline.checkpoint.model_files import save_model, takes_state
from paceline.checkpoint.snapshot import to_memory
from paceline.environment import rank_place
from paceline.errors import ArgumentError, CheckpointError
from paceline.train.callbacks import has_event
from paceline.train.interruption import was_interrupted
from paceline.train.state import TrainerState
from paceline.train.turns import Turns

if TYPE_CHECKING:
    from paceline.train.arguments import TrainingArguments
    from paceline.train.trainer import Trainer

logger = logging.getLogger(__name__)

STATE_NAME = "trainer_state.json"
OPTIMIZER_NAME = "optimizer.pt"
SCHEDULE_NAME = "scheduler.pt"
SCALER_NAME = "scaler.pt"
STREAM_NAME = "stream.pt"


@dataclass
class Saving:
    """The checkpoint under way.

    Attributes:
        folder: where it will be, the same on every rank; None if none is under way.
        writer: writes it, on a rank that saves.
    """

    folder: Path | None = None
    writer: BackgroundWriter = field(default_factory=BackgroundWriter)


def save(trainer: Trainer, progress: dict[str, Any]) -> Path:
    """Begin ``checkpoint-<global_step>``; it will be there whole or not at all.

    Raises:
        CheckpointError: the writing rank could not write this one, or the one before; what was there is as it
            was.
        PeerFailedError: on the ranks that waited for it.
    """
    settle(trainer)
    args = trainer.args
    folder = Path(str(args.output_dir)) / f"checkpoint-{trainer.state.global_step}"
    if trainer.state.best_global_step == trainer.state.global_step:
        trainer.state.best_model_checkpoint = str(folder)
    trainer.store_flos()
    trainer.state.stateful_callbacks = trainer.callback_handler.states(trainer.control)
    trainer.saving.folder = folder
    at_once = _any_rank(trainer, _is_needed_at_once(trainer))
    if args.should_save:
        trainer.saving.writer.start(_prepare_or_fail(trainer, folder, progress, at_once))
    if at_once:
        settle(trainer)
    return folder


def settle(trainer: Trainer) -> None:
    """Return when the checkpoint under way is written, on every rank.

    A waiting rank waits as long as the writing one lives.

    Raises:
        CheckpointError: the writing rank could not write; what was there before is as it was.
        PeerFailedError: on the ranks that waited for it.
    """
    saving, args = trainer.saving, trainer.args
    folder, saving.folder = saving.folder, None
    if folder is None:
        return
    first = args.process_index - rank_place().local_rank if args.save_on_each_node else 0
    with Turns().first(first, f"saving {folder}"):
        if args.should_save:
            with _naming(folder):
                saving.writer.wait()


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """What fails in the block names the folder: torch says of a full disk only that a size is wrong."""
    try:
        yield
    except Exception as error:
        free = shutil.disk_usage(folder.parent).free if folder.parent.is_dir() else 0
        raise CheckpointError(
            f"{folder} could not be written ({type(error).__name__}: {error}); {free:,} bytes are free. "
            f"What was saved before is intact"
        ) from error


def let_go(trainer: Trainer) -> None:
    """Let this rank's writer come to its end after training has failed; what it raises is logged."""
    trainer.saving.folder = None
    try:
        trainer.saving.writer.wait()
    except Exception:
        logger.exception("a checkpoint could not be written either")


def find(trainer: Trainer, resume: str | bool | None) -> Path | None:
    """The folder to resume from, the same on every rank; None to start afresh.

    Args:
        trainer: whose output_dir is searched.
        resume: a folder; True for the newest complete checkpoint; False for none; None for none too,
            unless the last run in output_dir was ended by SIGTERM, which is then gone on with.

    Raises:
        CheckpointError: there is none, or the named one is not complete.
    """
    output_dir = Path(str(trainer.args.output_dir))
    if resume is None and _any_rank(trainer, trainer.args.process_index == 0 and was_interrupted(output_dir)):
        logger.warning(
            "the last run in %s was ended by SIGTERM, so this one goes on from its checkpoint; "
            "write train(resume_from_checkpoint=False) to start afresh",
            output_dir,
        )
        resume = True
    if resume is None or resume is False:
        return None
    if resume is True:
        return _find_newest(trainer, output_dir)
    folder = Path(resume)
    reason = Turns().on_rank_zero(lambda: _flaw_of_named(folder), f"checking {folder}")
    if reason is not None:
        raise CheckpointError(f"cannot resume from {folder}: {reason}")
    return folder


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
    for name, owner in _owners_of_state(trainer).items():
        if name != SCALER_NAME or (folder / name).is_file():
            saved = torch.load(folder / name, map_location=trainer.args.device, weights_only=True)
            owner.load_state_dict(saved)
    manifest = contents.read_manifest(folder)
    progress = manifest.progress if manifest is not None else {}
    return TrainerState.load_from_json(folder / STATE_NAME), progress


def load_place_in_stream(folder: Path) -> dict[str, Any] | None:
    """Where the stream of training data stood; None if the checkpoint does not say."""
    if not (folder / STREAM_NAME).is_file():
        return None
    try:
        place: dict[str, Any] = torch.load(folder / STREAM_NAME, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        logger.warning(
            "%s holds more than plain values, so the stream is read up to its place: %s",
            folder / STREAM_NAME,
            error,
        )
        return None
    return place


def load_best(trainer: Trainer) -> None:
    """Read the weights of the checkpoint that is the best for rank 0 into the model."""
    best = Turns().on_rank_zero(lambda: trainer.state.best_model_checkpoint, "choosing the best checkpoint")
    logger.info("loading the best model, from %s", best)
    if best is not None:
        trainer._load_from_checkpoint(best)


def keep_the_single_one(trainer: Trainer) -> None:
    """At the end of a run with save_total_limit=1: of the newest and the best only the best stays."""
    best = trainer.state.best_model_checkpoint
    if trainer.args.should_save and trainer.args.save_total_limit == 1 and best is not None:
        for folder in contents.keep_only(Path(best)):
            logger.info("deleted %s (save_total_limit=1)", folder)


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


def _is_needed_at_once(trainer: Trainer) -> bool:
    """Whether somebody looks at the files at once, or they are written in a way of the user's own."""
    watched = any(has_event(callback, "on_save") for callback in trainer.callback_handler.callbacks)
    return watched or trainer.saves_in_its_own_way or not takes_state(trainer.model)


def _any_rank(trainer: Trainer, flag: bool) -> bool:
    answer = torch.tensor(int(flag), device=trainer.args.device)
    return bool(trainer.collectives.max(answer, "agreeing on a checkpoint"))


def _prepare_or_fail(
    trainer: Trainer, folder: Path, progress: dict[str, Any], at_once: bool
) -> Callable[[], None]:
    """`_prepare`; what it raises is raised by the job, so that all ranks learn of it in `settle`."""
    try:
        return _prepare(trainer, folder, progress, at_once)
    except Exception as error:
        return partial(_raise, error)


def _raise(error: Exception) -> None:
    raise error


def _prepare(trainer: Trainer, folder: Path, progress: dict[str, Any], at_once: bool) -> Callable[[], None]:
    """Take down what the checkpoint will hold; the result writes it, at whatever time."""
    parts = {}
    if not trainer.args.save_only_model:
        parts = {name: owner.state_dict() for name, owner in _owners_of_state(trainer).items()}
        place = trainer.place_in_stream()
        parts |= {} if place is None else {STREAM_NAME: place}
    with ExitStack() as stack:
        aside = stack.enter_context(whole_folder(folder))
        if at_once:
            trainer.save_model(str(aside), _internal_call=True)
        else:
            trainer.save_companions(aside)
            parts = to_memory(parts)
        weights = None if at_once else to_memory(trainer.model.state_dict())
        trainer.state.save_to_json(aside / STATE_NAME)
        step, best = trainer.state.global_step, trainer.state.best_model_checkpoint
        rest = stack.pop_all()  # from here on the folder is the job's

    def write() -> None:
        with rest:
            if weights is not None:
                save_model(trainer.model, aside, weights)
            for name, part in parts.items():
                torch.save(part, aside / name)
            contents.seal(aside, step, trainer.args.world_size, progress)
        _tidy(trainer, folder.parent, best)

    return write


def _owners_of_state(trainer: Trainer) -> dict[str, Any]:
    """What has a state beside the model, by the name of its file."""
    owners = {OPTIMIZER_NAME: trainer.optimizer, SCHEDULE_NAME: trainer.lr_scheduler}
    scaler = trainer.accelerator.scaler
    return owners if scaler is None else {**owners, SCALER_NAME: scaler}


def _tidy(trainer: Trainer, output_dir: Path, best: str | None) -> None:
    for folder in contents.keep_newest(
        output_dir, trainer.args.save_total_limit, Path(best) if best else None
    ):
        logger.info("deleted %s (save_total_limit=%s)", folder, trainer.args.save_total_limit)
    remove_leftovers(output_dir)


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
    try:
        if not folder.is_dir():
            return "there is no such folder"
        if not (folder / contents.MANIFEST).is_file():
            return None if (folder / STATE_NAME).is_file() else f"it has no {STATE_NAME}"
    except OSError as error:
        return f"it cannot be read ({error})"
    return contents.flaw(folder)
