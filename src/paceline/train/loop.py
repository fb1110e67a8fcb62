"""The training loop, and where each callback fires.

    on_train_begin
    [evaluate]                                      eval_on_start
    for each epoch:
        on_epoch_begin
        for each step of the epoch:
            on_step_begin
            get_batch_samples
            for each micro-batch:                   step.py
                forward, backward
                on_substep_end                      but not after the last
            on_pre_optimizer_step                   gradients averaged and clipped
            optimizer step
            on_optimizer_step
            on_step_end
            [log: on_log] [evaluate: on_evaluate] [save: on_save]
        on_epoch_end
        [log: on_log] [evaluate: on_evaluate] [save: on_save]
    on_log                                          the run's totals
    on_train_end

Whatever a callback decides on one rank is agreed on by all before anything is done
about it (`TrainerControl.agree`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.errors import ArgumentError
from paceline.recorder.ring import recorder
from paceline.train import batch_size, checkpoints, interruption, overflow, report
from paceline.train.feeds import StepData, feed_of
from paceline.train.neftune import noisy_embeddings
from paceline.train.randomness import derive_seed, seed_again
from paceline.train.run import Run, prepare
from paceline.train.step import StepOutcome, run_step
from paceline.train.tokens import count_tokens
from paceline.train.turns import Turns

if TYPE_CHECKING:
    from paceline.train.trainer import Trainer

logger = logging.getLogger(__name__)


class TrainOutput(NamedTuple):
    """What `Trainer.train` returns, the same on every rank: steps done, their mean loss, speed."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


def train(trainer: Trainer, resume: str | bool | None, ignore_keys: list[str] | None) -> TrainOutput:
    """Train to the end; the head of this file is its outline."""
    run = prepare(trainer, resume, ignore_keys)
    trainer.progress, trainer.place_in_stream = run.progress, lambda: run.feed.state()
    started = time.perf_counter()
    with trainer.interruption, _closing(run):
        trainer.fire("on_train_begin")
        if trainer.args.eval_on_start:
            _evaluate(run, moves_schedule=False)
        _agree(trainer)
        with noisy_embeddings(trainer.model, trainer.args.neftune_noise_alpha), _watched(trainer):
            while not _is_over(run):
                _run_epoch(run)
        return _finish(run, time.perf_counter() - started)


@contextmanager
def _closing(run: Run) -> Iterator[None]:
    """The block after which the run's data is let go of, be it another feed by then."""
    try:
        yield
    finally:
        run.feed.close()


def _watched(trainer: Trainer) -> AbstractContextManager[None]:
    """The block in which debug="underflow_overflow" looks at every module."""
    wanted = overflow.NAME in trainer.args.debug
    where = f"rank {trainer.collectives.rank}, step "
    return overflow.watched(trainer.model, wanted, lambda: f"{where}{trainer.state.global_step + 1}")


def _is_over(run: Run) -> bool:
    """A callback ended it, its steps are done, or its epochs are (callbacks may cut them short)."""
    trainer = run.trainer
    if trainer.control.should_training_stop or trainer.state.global_step >= trainer.state.max_steps:
        return True
    return trainer.args.max_steps <= 0 and run.epoch >= trainer.state.num_train_epochs


def _run_epoch(run: Run) -> None:
    """The rest of the epoch that the run stands in."""
    trainer = run.trainer
    trainer.control.should_epoch_stop = False
    _settle_before_forks(trainer)
    run.feed.start_at(run.epoch, run.step)
    began_at = run.step
    trainer.fire("on_epoch_begin")
    ended = False
    while not ended:
        recorder().step, recorder().micro_batch = trainer.state.global_step + 1, 0
        with run.clock.data:
            data = run.feed.next_step()
        if data is None:
            break
        _run_one_step(run, data)
        ended = trainer.control.should_epoch_stop or _is_over(run)
    if not ended or trainer.control.should_epoch_stop or run.step == run.feed.steps:
        _note_end_of_epoch(run, began_at)
    trainer.fire("on_epoch_end")
    _log_evaluate_save(run)


def _note_end_of_epoch(run: Run, began_at: int) -> None:
    """The next epoch is next; an epoch without any step means that a stream has dried up."""
    if run.step == 0 and run.trainer.state.global_step == 0:
        raise ArgumentError("there is nothing to train on: the training data gave no sample on any rank")
    if run.step == began_at == 0:
        logger.warning(
            "the training data gave no sample in epoch %d, so training ends after step %d of %d",
            run.epoch,
            run.trainer.state.global_step,
            run.trainer.state.max_steps,
        )
        run.trainer.control.should_training_stop = True
    run.epoch, run.step = run.epoch + 1, 0


def _run_one_step(run: Run, data: StepData) -> None:
    trainer, state, control = run.trainer, run.trainer.state, run.trainer.control
    control.should_log = control.should_evaluate = control.should_save = False
    seed_again(derive_seed("step", trainer.args.seed, state.global_step, trainer.collectives.rank))
    tokens = count_tokens(trainer, data)
    trainer.fire("on_step_begin")
    outcome = run_step(trainer, data, run.clock, lambda error: _split_further(run, error))
    run.meter.add(outcome.loss)
    run.step += 1
    run.samples += data.samples
    run.tokens += tokens
    state.num_input_tokens_seen += tokens
    state.global_step += 1
    state.epoch = run.epoch + run.step / run.feed.steps
    recorder().phase("after the optimizer's step")
    _empty_cache_if_due(trainer)
    trainer.fire("on_step_end")
    _log_evaluate_save(run, outcome)


def _split_further(run: Run, error: Exception) -> StepData:
    """The step at hand in smaller micro-batches, if it is memory that was short."""
    trainer = run.trainer
    batch_size.split_further(trainer, error)
    run.feed = feed_of(trainer.get_train_dataloader(), trainer.args, trainer.collectives)
    trainer.callback_handler.train_dataloader = run.feed.loader
    run.feed.start_at(run.epoch, run.step)
    data = run.feed.next_step()
    assert data is not None  # there was one before
    seed_again(derive_seed("step", trainer.args.seed, trainer.state.global_step, trainer.collectives.rank))
    return data


def _log_evaluate_save(run: Run, outcome: StepOutcome | None = None) -> None:
    """Do what is due; between two of them callbacks run, so the ranks agree anew each time."""
    trainer = run.trainer
    interrupted = _agree(trainer)
    if trainer.control.should_log and run.meter.steps_since_log:
        _log(run, outcome)
        interrupted = _agree(trainer)
    if interrupted:
        _save_and_leave(trainer)
    if trainer.control.should_evaluate:
        _evaluate(run)
        _agree(trainer)
    if trainer.control.should_save:
        with run.clock.saving:
            trainer._save_checkpoint(trainer.model_wrapped, None)
        trainer.control.should_save = False
        trainer.fire("on_save")
        _agree(trainer)


def _agree(trainer: Trainer) -> bool:
    """Make the ranks' wishes one; whether SIGTERM has come to any of them."""
    wishes = (trainer.interruption.asked, trainer.saving.writer.failed)
    interrupted, failed = trainer.control.agree(trainer.collectives, trainer.args.device, wishes)
    if failed:
        checkpoints.settle(trainer)
    return interrupted


def _settle_before_forks(trainer: Trainer) -> None:
    """Workers that load data are about to be forked, and would inherit locks the writer holds, for ever."""
    if trainer.args.dataloader_num_workers:
        checkpoints.settle(trainer)


def _save_and_leave(trainer: Trainer) -> NoReturn:
    """Save, let callbacks and writers finish, and end the process; interruption.py says why."""
    logger.warning("SIGTERM: saving step %d, and leaving", trainer.state.global_step)
    _save_at_once(trainer)
    interruption.mark(trainer.args)
    trainer.fire("on_train_end")
    raise SystemExit(interruption.EXIT_CODE)


def _leave_at_the_end(trainer: Trainer) -> NoReturn:
    """The same once on_train_end has fired.

    A model that holds the best weights by now is not that of the last step, so it is no checkpoint of it.
    """
    logger.warning("SIGTERM: leaving at the end of training")
    if not trainer.args.load_best_model_at_end:
        _save_at_once(trainer)
    interruption.mark(trainer.args)
    raise SystemExit(interruption.EXIT_CODE)


def _save_at_once(trainer: Trainer) -> None:
    trainer._save_checkpoint(trainer.model_wrapped, None)
    checkpoints.settle(trainer)
    trainer.fire("on_save")


def _log(run: Run, outcome: StepOutcome | None) -> None:
    logs: dict[str, float] = {"loss": run.meter.drain()}
    if outcome is not None:
        logs["grad_norm"] = outcome.grad_norm
    logs["learning_rate"] = outcome.learning_rate if outcome else run.trainer.learning_rate
    run.trainer.control.should_log = False
    run.trainer.store_flos()
    run.note_speed()
    run.trainer.log(logs)


def _evaluate(run: Run, moves_schedule: bool = True) -> None:
    trainer = run.trainer
    trainer.control.should_evaluate = False
    _settle_before_forks(trainer)
    with run.clock.evaluation:
        metrics = trainer._evaluate(None, run.ignore_keys)
    if moves_schedule and isinstance(trainer.lr_scheduler, ReduceLROnPlateau):
        trainer.lr_scheduler.step(checkpoints.metric_of(trainer.args, metrics))
    is_best = trainer._determine_best_metric(metrics)
    if trainer.args.save_strategy == "best":
        trainer.control.should_save |= is_best


def _empty_cache_if_due(trainer: Trainer) -> None:
    every = trainer.args.torch_empty_cache_steps
    if every and trainer.state.global_step % every == 0 and trainer.args.device.type != "cpu":
        torch.accelerator.memory.empty_cache()


def _finish(run: Run, seconds: float) -> TrainOutput:
    trainer, state = run.trainer, run.trainer.state
    run.meter.drain()
    loss = run.meter.before_log / max(state.global_step, 1)
    trainer.store_flos()
    metrics = {**_speed(run, seconds), "total_flos": state.total_flos, "train_loss": loss}
    metrics |= trainer.memory.stop("train")
    trainer.log(metrics)
    checkpoints.settle(trainer)
    if _agree(trainer):
        _save_and_leave(trainer)
    if trainer.args.load_best_model_at_end:
        trainer._load_best_model()
    report.write(run, metrics)
    trainer.fire("on_train_end")
    with Turns().first(0, "on_train_end of its callbacks"):  # which may take long, as an upload does
        pass
    if _agree(trainer):
        _leave_at_the_end(trainer)
    checkpoints.keep_the_single_one(trainer)
    interruption.unmark(trainer.args)
    trainer.model_wrapped = trainer.model  # lets go of the wrapper and its hooks
    return TrainOutput(state.global_step, loss, metrics)


def _speed(run: Run, seconds: float) -> dict[str, float]:
    """Speed of this call: steps that an earlier run had done do not count."""
    steps = run.trainer.state.global_step - run.first_step
    speed = {
        "train_runtime": round(seconds, 4),
        "train_samples_per_second": round(run.samples / seconds, 3),
        "train_steps_per_second": round(steps / seconds, 3),
    }
    if run.tokens:
        speed["train_tokens_per_second"] = round(run.tokens / seconds, 3)
    return speed
