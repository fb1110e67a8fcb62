"""Callbacks: what may be hung into the loop, and those that are there from the start.

`loop.py` opens with the loop and where each event fires. A callback written for Hugging
Face's TrainerCallback works as it is: what counts is the names of its methods.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from paceline.errors import ArgumentError
from paceline.train.arguments import TrainingArguments
from paceline.train.state import TrainerControl, TrainerState

logger = logging.getLogger(__name__)

EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_substep_end",
    "on_step_end",
    "on_evaluate",
    "on_predict",
    "on_save",
    "on_log",
    "on_prediction_step",
    "on_push_begin",
)


# What their handler's methods take by place, beyond args, state and control.
_PAYLOADS = {"on_evaluate": ("metrics",), "on_predict": ("metrics",), "on_log": ("logs",)}


class TrainerCallback:
    """Base of callbacks; override the events that matter.

    Every event gets ``(args, state, control, **kwargs)``, on every rank, where kwargs
    holds model (not wrapped), processing_class, optimizer, lr_scheduler,
    train_dataloader and eval_dataloader. A switch that is set in `control` on one rank
    takes effect on all ranks at the same step. An event may return a control to use
    from then on, or nothing.
    """

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """The Trainer is made."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Training begins."""

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Training has ended."""

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An epoch begins."""

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An epoch has ended."""

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A step begins, before its first micro-batch."""

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Gradients are averaged and clipped; the optimizer has not moved yet."""

    def on_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """The optimizer has moved; gradients are still there."""

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A micro-batch that is not its step's last is through."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A step is through; global_step counts it."""

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An evaluation is through; kwargs has its metrics."""

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A prediction is through; kwargs has its metrics."""

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A checkpoint is complete."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Something was logged; kwargs has the logs."""

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """An evaluation batch is through."""

    def on_push_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An upload begins; never fires, because nothing is uploaded."""


class CallbackHandler:
    """Calls an event of every callback, in their order.

    Attributes:
        callbacks: the list; a callback's class may be given for an instance made without arguments.
        model, processing_class, optimizer, lr_scheduler, train_dataloader, eval_dataloader:
            what callbacks get as keyword arguments; the Trainer keeps them up to date.
    """

    def __init__(self, callbacks: Iterable[Any], model: Any, processing_class: Any) -> None:
        self.callbacks: list[Any] = []
        self._listeners: dict[str, list[Any]] = {}
        self._known: list[Any] = []
        self.model, self.processing_class = model, processing_class
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self.train_dataloader: Any = None
        self.eval_dataloader: Any = None
        for callback in callbacks:
            self.add_callback(callback)

    def __getattr__(self, name: str) -> Any:
        """An event as a method, as subclasses call it: ``on_evaluate(args, state, control, metrics)``."""
        if name not in EVENTS:
            raise AttributeError(f"the callback handler has no {name}")
        return partial(self._call_with_payload, name)

    def _call_with_payload(
        self, event: str, args: Any, state: Any, control: Any, *payload: Any, **kwargs: Any
    ) -> TrainerControl:
        named = dict(zip(_PAYLOADS.get(event, ()), payload, strict=True))
        return self.call_event(event, args, state, control, **named, **kwargs)

    @property
    def callback_list(self) -> str:
        """The callbacks' class names, one a line."""
        return "\n".join(type(each).__name__ for each in self.callbacks)

    def add_callback(self, callback: Any) -> None:
        """Add a callback, or an instance of a callback class."""
        self.callbacks.append(callback() if isinstance(callback, type) else callback)

    def pop_callback(self, callback: Any) -> Any:
        """Take out a callback, or the first of a class, and return it; None if it is not there."""
        for each in self.callbacks:
            if each is callback or (isinstance(callback, type) and _is_a(each, callback)):
                self.callbacks.remove(each)
                return each
        return None

    def remove_callback(self, callback: Any) -> None:
        """Take out a callback, or the first of a class."""
        self.pop_callback(callback)

    def states(self, control: TrainerControl) -> dict[str, Any]:
        """What callbacks with a state, and the control, give to be saved, by class name."""
        states: dict[str, Any] = {}
        for each in [*self.callbacks, control]:
            if not exports_state(each):
                continue
            name, own = type(each).__name__, each.state()
            if name not in states:
                states[name] = own
            elif isinstance(states[name], list):
                states[name].append(own)
            else:
                states[name] = [states[name], own]
        return states

    def restore(self, states: dict[str, Any]) -> None:
        """Bring callbacks to saved states; one that is saved and not here is named in a warning."""
        for name, saved in states.items():
            here = [each for each in self.callbacks if exports_state(each) and type(each).__name__ == name]
            if not here and name != "TrainerControl":
                logger.warning("the checkpoint has a state of %s, but there is no such callback", name)
            for callback, state in zip(here, saved if isinstance(saved, list) else [saved], strict=False):
                fresh = type(callback)(**state.get("args", {}))
                vars(callback).update({**vars(fresh), **state.get("attributes", {})})

    def call_event(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Call `event` of every callback; returns the control to go on with."""
        for method in self._listening(event):
            result = method(
                args,
                state,
                control,
                model=self.model,
                processing_class=self.processing_class,
                optimizer=self.optimizer,
                lr_scheduler=self.lr_scheduler,
                train_dataloader=self.train_dataloader,
                eval_dataloader=self.eval_dataloader,
                **kwargs,
            )
            control = control if result is None else result
        return control

    def _listening(self, event: str) -> list[Any]:
        """The callbacks' methods for `event`; most do nothing on most events, which comes for nothing."""
        if self._known != self.callbacks or event == "on_train_begin":
            self._known, self._listeners = list(self.callbacks), {}
        if event not in self._listeners:
            listening = [each for each in self.callbacks if has_event(each, event)]
            self._listeners[event] = [getattr(each, event) for each in listening]
        return self._listeners[event]


def exports_state(callback: Any) -> bool:
    """Whether a callback has a state to be saved: a method `state` that gives args and attributes."""
    return callable(getattr(type(callback), "state", None))


def has_event(callback: Any, event: str) -> bool:
    """Whether a callback does something on `event`, rather than inherit a base's empty method."""
    method = getattr(callback, event, None)
    return method is not None and getattr(method, "__qualname__", "") != f"TrainerCallback.{event}"


class DefaultFlowCallback(TrainerCallback):
    """Sets the switches that the strategies in TrainingArguments ask for."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Steps: log, evaluate, save when due; the last step evaluates and saves in any case."""
        step, last = state.global_step, state.global_step >= state.max_steps
        if args.logging_strategy == "steps" and step % state.logging_steps == 0:
            control.should_log = True
        if args.logging_first_step and step == 1:
            control.should_log = True
        if (
            args.eval_strategy == "steps"
            and step >= args.eval_delay
            and (last or _due(step, state.eval_steps))
        ):
            control.should_evaluate = True
        if args.save_strategy == "steps" and (last or _due(step, state.save_steps)):
            control.should_save = True
        if last:
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Epochs: log, evaluate, save."""
        if args.logging_strategy == "epoch":
            control.should_log = True
        if args.eval_strategy == "epoch" and state.epoch >= args.eval_delay:
            control.should_evaluate = True
        if args.save_strategy == "epoch":
            control.should_save = True


class ProgressCallback(TrainerCallback):
    """A bar on rank 0 with loss, samples per second and the time left; the logs above it."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.evaluation_bar: Any = None
        self.samples_per_step = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Show the bar."""
        self.samples_per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        if state.is_world_process_zero:
            self.bar = _bar(total=state.max_steps, initial=state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """One step on."""
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """One evaluation batch on, in a bar of its own."""
        loader = kwargs.get("eval_dataloader")
        if state.is_world_process_zero and loader is not None:
            if self.evaluation_bar is None:
                self.evaluation_bar = _bar(total=len(loader), leave=self.bar is None)
            self.evaluation_bar.update(1)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take the evaluation's bar away."""
        if self.evaluation_bar is not None:
            self.evaluation_bar.close()
            self.evaluation_bar = None

    on_predict = on_evaluate

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the logs above the bar, and the loss and the speed beside it."""
        if self.bar is None:
            return
        self.bar.write(_as_line(kwargs["logs"]))
        loss, steps_per_second = kwargs["logs"].get("loss"), self.bar.format_dict["rate"]
        if loss is not None and steps_per_second:
            speed = steps_per_second * self.samples_per_step
            self.bar.set_postfix_str(f"loss {loss:.4g}, {speed:.4g} samples/s", refresh=False)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


class PrinterCallback(TrainerCallback):
    """Prints each log as a line, on rank 0; stands in for the bar when it is disabled."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Print."""
        if state.is_world_process_zero:
            print(_as_line(kwargs["logs"]), flush=True)


class EarlyStoppingCallback(TrainerCallback):
    """Stops when metric_for_best_model has not got better for some evaluations in a row.

    Args:
        early_stopping_patience: evaluations without improvement that are borne.
        early_stopping_threshold: how much better counts as better.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float = 0.0) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, in Hugging Face's form."""
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check that there will be something to go by.

        Raises:
            ArgumentError: there is no metric, or no evaluation.
        """
        if args.metric_for_best_model is None or args.eval_strategy == "no":
            raise ArgumentError(
                "EarlyStoppingCallback needs metric_for_best_model, and eval_strategy other than 'no'"
            )

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Compare with the best so far, count, stop."""
        name = args.metric_for_best_model
        value = kwargs["metrics"].get(name if name.startswith("eval_") else f"eval_{name}")
        if value is None:
            logger.warning(
                "EarlyStoppingCallback: no %s among the metrics %s", name, sorted(kwargs["metrics"])
            )
            return
        best = state.best_metric
        gain = 0.0 if best is None else (value - best) * (1 if args.greater_is_better else -1)
        if best is None or gain > self.early_stopping_threshold:
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True


def default_callbacks(args: TrainingArguments) -> Sequence[TrainerCallback]:
    """The callbacks every Trainer starts with."""
    return [DefaultFlowCallback(), PrinterCallback() if args.disable_tqdm else ProgressCallback()]


def _is_a(callback: Any, kind: type) -> bool:
    """Whether a callback is of a class, or stands for Hugging Face's class of the same name."""
    return isinstance(callback, kind) or (
        kind.__module__.startswith("transformers.") and type(callback).__name__ == kind.__name__
    )


def _due(step: int, interval: float | None) -> bool:
    return interval is not None and interval > 0 and step % interval == 0


def _bar(**settings: Any) -> Any:
    from tqdm.auto import tqdm  # only where a bar is shown

    return tqdm(dynamic_ncols=True, **settings)


def _as_line(logs: dict[str, Any]) -> str:
    return str(
        {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in logs.items()}
    )
