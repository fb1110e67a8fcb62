"""One call of `Trainer.train`: what it consists of, and everything before its first step."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import CheckpointError
from paceline.train import changed_arguments, checkpoints, setup
from paceline.train.clock import Clock
from paceline.train.collectives import Collectives
from paceline.train.feeds import Feed, feed_of
from paceline.train.state import TrainerControl, TrainerState

if TYPE_CHECKING:
    from paceline.train.trainer import Trainer

logger = logging.getLogger(__name__)


class LossMeter:
    """Sums of the steps' losses: since the last log, and of the whole run.

    Args:
        collectives: to average over ranks with.
        device: this rank's.
        skip_bad: count a NaN or infinite loss as the mean of the others since the last log.
    """

    def __init__(self, collectives: Collectives, device: torch.device, skip_bad: bool) -> None:
        self.collectives, self.device, self.skip_bad = collectives, device, skip_bad
        self.since_log = 0.0
        self.steps_since_log = 0
        self.before_log = 0.0

    def add(self, loss: float) -> None:
        """Count one step's loss of this rank."""
        if self.skip_bad and not math.isfinite(loss):
            loss = self.since_log / (1 + self.steps_since_log)
        self.since_log += loss
        self.steps_since_log += 1

    def mean_over_ranks(self) -> float:
        """The sum since the last log, averaged over ranks, on every rank."""
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        own = torch.tensor(self.since_log, dtype=dtype, device=self.device)
        return float(self.collectives.sum(own, "averaging the logged loss")) / self.collectives.world_size

    def drain(self) -> float:
        """The mean loss of the steps since the last log, on every rank; starts the next stretch."""
        total, steps = self.mean_over_ranks(), self.steps_since_log
        self.before_log += total
        self.since_log = 0.0
        self.steps_since_log = 0
        return total / max(steps, 1)


@dataclass
class Run:
    """One call of `Trainer.train`.

    Attributes:
        trainer: whose run it is.
        feed: gives the steps' micro-batches.
        meter: of losses.
        ignore_keys: entries of the outputs that evaluations leave out.
        first_step: global_step at which this call began.
        epoch, step: the place in the data: the next step to take is step `step` of epoch `epoch`.
        samples: samples that this call has trained on, over all ranks.
        tokens: input tokens that this call has trained on, over all ranks, if they are counted.
        clock: where this rank's time goes.
        speeds: at each log, (step, samples per second since the log before).
    """

    trainer: Trainer
    feed: Feed
    meter: LossMeter
    ignore_keys: list[str] | None
    first_step: int = 0
    epoch: int = 0
    step: int = 0
    samples: int = 0
    tokens: int = 0
    clock: Clock = field(init=False)
    speeds: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = Clock([self.trainer.collectives])
        self._at_last_log = (self.clock.total, 0)

    def note_speed(self) -> None:
        """Note how fast the steps since the log before were."""
        (before, samples), now = self._at_last_log, self.clock.total
        self._at_last_log = (now, self.samples)
        self.speeds.append(
            (self.trainer.state.global_step, (self.samples - samples) / max(now - before, 1e-9))
        )

    def progress(self) -> dict[str, Any]:
        """What a checkpoint must hold beyond the state for losses and place in the data to go on."""
        cut_short = self.step > 0 and self.trainer.control.should_epoch_stop
        epoch, step = (self.epoch + 1, 0) if cut_short else (self.epoch, self.step)
        return {
            "global_batch": self.feed.global_size,
            "epoch_samples": self.feed.num_samples,
            "epoch": epoch,
            "step": step,
            "loss_before_log": self.meter.before_log,
            "loss_since_log": self.meter.mean_over_ranks(),
            "steps_since_log": self.meter.steps_since_log,
            "arguments": changed_arguments.to_be_kept(self.trainer.args),
        }


def prepare(trainer: Trainer, resume: str | bool | None, ignore_keys: list[str] | None) -> Run:
    """Find what to resume from, load it, wrap the model, make optimizer, schedule and state.

    The weights are read before the model is wrapped, because wrapping makes all ranks
    equal to rank 0; the optimizer's state after the optimizer is made for the model.
    """
    found = checkpoints.find(trainer, resume)
    if found is not None:
        trainer._load_from_checkpoint(str(found))
    run = _with_data(trainer, ignore_keys)
    max_steps = _max_steps(run)
    trainer.model_wrapped = trainer.wrap_model()
    run.clock.watch(trainer.model_wrapped)
    _make_optimizer_and_schedule(trainer, max_steps)
    _start_state(run, max_steps)
    if found is not None:
        _resume(run, found)
    run.first_step = trainer.state.global_step
    return run


def _with_data(trainer: Trainer, ignore_keys: list[str] | None) -> Run:
    feed = feed_of(trainer.get_train_dataloader(), trainer.args, trainer.collectives)
    skip_bad = trainer.args.logging_nan_inf_filter
    meter = LossMeter(trainer.collectives, trainer.args.device, skip_bad)
    return Run(trainer, feed, meter, ignore_keys)


def _max_steps(run: Run) -> int:
    """Steps of the whole run."""
    args = run.trainer.args
    return args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * run.feed.steps)


def _make_optimizer_and_schedule(trainer: Trainer, max_steps: int) -> None:
    """A new run gets new ones, unless the user gave them."""
    if not trainer.optimizers_given[0]:
        trainer.optimizer = None
    if not trainer.optimizers_given[1]:
        trainer.lr_scheduler = None
    trainer.create_optimizer_and_scheduler(max_steps)


def _start_state(run: Run, max_steps: int) -> None:
    trainer, handler = run.trainer, run.trainer.callback_handler
    trainer.state, trainer.control = setup.fresh_state(trainer.args), TrainerControl()
    trainer.state.compute_steps(trainer.args, max_steps)
    trainer.state.max_steps = max_steps
    trainer.state.num_train_epochs = math.ceil(max_steps / run.feed.steps)
    handler.model, handler.train_dataloader = trainer.model, run.feed.loader
    handler.optimizer, handler.lr_scheduler = trainer.optimizer, trainer.lr_scheduler


def _resume(run: Run, folder: Path) -> None:
    saved, progress = checkpoints.load_progress(run.trainer, folder)
    _adopt(run.trainer.state, saved)
    if run.trainer.args.restore_callback_states_from_checkpoint:
        run.trainer.callback_handler.restore(saved.stateful_callbacks)
    if not progress:  # another tool wrote the checkpoint
        run.epoch, run.step = divmod(saved.global_step, run.feed.steps)
    else:
        _check_same_steps(run, progress, folder)
        _warn_of_changes(run, progress, folder)
        run.epoch, run.step = progress["epoch"], progress["step"]
        run.meter.before_log = progress["loss_before_log"]
        run.meter.since_log = progress["loss_since_log"]
        run.meter.steps_since_log = progress["steps_since_log"]
    if run.trainer.args.ignore_data_skip:
        run.step = 0
    place = checkpoints.load_place_in_stream(folder)
    if place is not None and progress:
        run.feed.load_state(place)


def _check_same_steps(run: Run, progress: dict[str, Any], folder: Path) -> None:
    """A step must be the same samples as before, or the place in the data means nothing."""
    feed, args = run.feed, run.trainer.args
    if args.ignore_data_skip:
        return
    if progress["global_batch"] != feed.global_size:
        raise CheckpointError(
            f"{folder} was made with a global batch of {progress['global_batch']} samples, but now it is "
            f"{feed.global_size} = per_device_train_batch_size {args.train_batch_size} x {args.world_size} "
            f"ranks x gradient_accumulation_steps {args.gradient_accumulation_steps}; choose them so that "
            f"the product stays the same, or set ignore_data_skip=True"
        )
    if progress["epoch_samples"] != feed.num_samples:
        raise CheckpointError(
            f"{folder} was made with a training set of {progress['epoch_samples']} samples, but now it has "
            f"{feed.num_samples}; give the same data, set ignore_data_skip=True, or start a new run from the "
            f"checkpoint's weights"
        )


def _warn_of_changes(run: Run, progress: dict[str, Any], folder: Path) -> None:
    changes = changed_arguments.in_words(progress.get("arguments", {}), run.trainer.args)
    if changes and run.trainer.is_world_process_zero():
        logger.warning("%s was made with other arguments. Now: %s", folder, changes)


def _adopt(state: TrainerState, saved: TrainerState) -> None:
    """Go on from a saved state; what belongs to this run and rank stays as it is."""
    for name in ("epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history"):
        setattr(state, name, getattr(saved, name))
    if saved.best_model_checkpoint is not None and not Path(saved.best_model_checkpoint).is_dir():
        logger.warning("the best checkpoint, %s, is not there any more", saved.best_model_checkpoint)
        return
    for name in ("best_metric", "best_global_step", "best_model_checkpoint"):
        setattr(state, name, getattr(saved, name))
