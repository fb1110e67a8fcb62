"""Trainer: Hugging Face's class, its constructor, methods and override points, as a facade.

Each method is one or two calls away from the function that does the work:

    train                loop.train -> step.run_step -> training_step -> compute_loss
    evaluate, predict    evaluation.evaluate -> prediction_step -> compute_loss
    get_*_dataloader     data_points.py -> data.py, streams.py
    create_*             optimizers.py, schedule.py
    save_model ...       outputs.py -> checkpoints.py, checkpoint/model_files.py
    what clients call    peer_names.py, accelerator.py
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from paceline.checkpoint.model_files import load_model
from paceline.engine.ddp import DistributedDataParallel
from paceline.errors import ArgumentError
from paceline.train import (
    batch_size,
    checkpoints,
    evaluation,
    feeds,
    loop,
    losses,
    optimizers,
    schedule,
    setup,
)
from paceline.train.accelerator import Accelerator
from paceline.train.arguments import TrainingArguments
from paceline.train.callbacks import CallbackHandler, default_callbacks
from paceline.train.collectives import Collectives
from paceline.train.data_points import DataPoints
from paceline.train.evaluation import EvalLoopOutput, PredictionOutput
from paceline.train.interruption import Interruption
from paceline.train.memory import MemoryMeter
from paceline.train.nonfinite import BadSteps
from paceline.train.outputs import Outputs
from paceline.train.peer_names import PeerNames
from paceline.train.randomness import be_deterministic, seed_all
from paceline.train.reporters import callbacks_for
from paceline.train.smoothing import smoother_for
from paceline.train.state import TrainerControl
from paceline.train.weighing import Weighing, alone, weighted

logger = logging.getLogger(__name__)


class Trainer(DataPoints, Outputs, PeerNames):
    """Trains and evaluates a model on all ranks.

    The result depends on the global batch (per_device_train_batch_size x ranks x
    gradient_accumulation_steps), not on how it is divided: the loss of a step is the mean
    over its items on all ranks. Exceptions are layers that mix samples, such as
    BatchNorm, which sees one rank's micro-batch at a time, and random numbers in
    the forward (dropout), which differ by rank.

    Args:
        model: any module whose forward takes a batch's entries by name and returns a loss: in a
            dict or ModelOutput under "loss", first in a tuple, or alone. Or give `model_init`.
        args: the settings; default: ``TrainingArguments("tmp_trainer")``.
        data_collator: makes a batch of a list of samples; default: stacks them, or pads them if
            `processing_class` is a tokenizer.
        train_dataset: has ``__len__`` and ``__getitem__``, or ``__iter__`` (then set max_steps).
        eval_dataset: the same, or a dict of several by name.
        processing_class: tokenizer or processor; saved along with the model.
        model_init: makes the model anew at each call of `train`, after seeding.
        compute_loss_func: called as ``f(outputs, labels, num_items_in_batch=n)`` in place of the
            model's own loss, n being the items of the step on all ranks; it then returns a sum over
            its items divided by n. If it does not take n, it returns a mean over its items.
        compute_metrics: called on rank 0 with an EvalPrediction over the whole data set; returns a
            dict, which every rank gets.
        callbacks: more of them; see callbacks.py.
        optimizers: an optimizer and a schedule to use instead of those `args` ask for.
        optimizer_cls_and_kwargs: an optimizer's class and settings, instead of ``args.optim``.
        preprocess_logits_for_metrics: called with (logits, labels) of each evaluation batch before
            they are kept.

    Attributes:
        model: not wrapped.
        model_wrapped: wrapped in DistributedDataParallel while training on several ranks.
        state, control: where the run stands, what happens next.
        model_accepts_loss_kwargs: whether the model's forward takes num_items_in_batch; set it to
            False in a subclass whose compute_loss returns a mean.
        accelerator: this rank among all, under the names of Accelerate's class.
        weighing: of the current micro-batch: what its loss is multiplied by before backward.
        label_smoother: computes smoothed losses, if label_smoothing_factor is set; else None.

    Raises:
        ArgumentError: neither or both of model and model_init are given, or args is of another class.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], nn.Module] | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        compute_metrics: Callable[[Any], dict[str, float]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self.args = setup.checked_arguments(args)
        self.memory = MemoryMeter(not self.args.skip_memory_metrics, self.args.device)
        self.memory.start("init")
        setup.set_log_level(self.args)
        if self.args.full_determinism:
            be_deterministic()
        seed_all(self.args.seed)
        self.weighing: Weighing = alone(self.args.world_size)
        self.accelerator = Accelerator(self.args, lambda: self.weighing)
        self.model_init = model_init
        self._take_model(setup.model_of(model, model_init))
        self.processing_class = processing_class
        self.data_collator = data_collator or setup.default_collator(processing_class)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.optimizer: Any = optimizers[0]
        self.lr_scheduler: Any = optimizers[1]
        self.optimizers_given = tuple(each is not None for each in optimizers)
        self.share_sizes: list[int] = []
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self.is_in_train, self.training_mode = False, setup.TrainingMode()
        self.saving, self.interruption = checkpoints.Saving(), Interruption(self.args)
        self.progress: Callable[[], dict[str, Any]] = dict  # of the run, while there is one
        self.place_in_stream: Callable[[], dict[str, Any] | None] = lambda: None  # of the run as well
        self.collectives = Collectives(lambda: f"step {self.state.global_step}")
        self.bad_steps = BadSteps(self.collectives)
        self.state, self.control = setup.fresh_state(self.args), TrainerControl()
        reporting = callbacks_for(list(self.args.report_to or []))
        self.callback_handler = CallbackHandler(
            [*default_callbacks(self.args), *reporting, *(callbacks or [])], self.model, processing_class
        )
        self.memory.stop("init")
        self.fire("on_init_end")

    # Training

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: None = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> loop.TrainOutput:
        """Train to the end.

        Args:
            resume_from_checkpoint: a checkpoint folder, or True for the newest complete one in output_dir.
            trial: must be None; there is no hyper-parameter search.
            ignore_keys_for_eval: entries of the outputs that evaluations leave out.

        Returns:
            steps, mean loss and speed, the same on every rank.

        Raises:
            CheckpointError: there is nothing complete to resume from, or it does not fit.
            CommunicationError: another rank did not come, or is gone.
        """
        if trial is not None:
            raise ArgumentError("trial is not supported: paceline has no hyper-parameter search")
        if self.model_init is not None:
            seed_all(self.args.seed)
            self._take_model(self.call_model_init())
        self.is_in_train, self.training_mode = True, setup.TrainingMode()
        self.memory.start("train")
        try:
            batch_size.find(self)
            return loop.train(self, resume_from_checkpoint, ignore_keys_for_eval)
        finally:
            self.is_in_train = False
            self.memory.stop("train")
            checkpoints.let_go(self)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: int | Tensor | None = None
    ) -> Tensor:
        """Forward and backward of one micro-batch.

        Returns:
            the weighted loss, detached; over a step's micro-batches it adds up to what, averaged
            over ranks, is the step's mean loss.
        """
        self.training_mode.switch_on(model)
        if hasattr(self.optimizer, "train"):  # an optimizer without schedule has modes of its own
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        extra: dict[str, Any] = {}
        if num_items_in_batch is not None:
            extra["num_items_in_batch"] = num_items_in_batch
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, **extra)
        self.accelerator.backward(loss)
        return weighted(loss.detach(), self.loss_weight)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: int | Tensor | None = None,
    ) -> Any:
        """The loss of one batch, a scalar; with return_outputs also the model's outputs.

        Override it for a loss of your own. Return the mean over the batch's items; or, computed with
        num_items_in_batch (the items of the step on all ranks), the sum over them divided by it. An
        override that also multiplies by ``accelerator.num_processes``, as Hugging Face's own does,
        is right as well.
        """
        extra = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        to_model = self.model_accepts_loss_kwargs
        loss_func, inputs = losses.loss_func_for(self, inputs)
        loss, outputs = losses.loss_and_outputs(model, inputs, loss_func, extra, to_model)
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """What the forward runs in: autocast, with bf16 or fp16."""
        return self.autocast_smart_context_manager()

    @property
    def loss_weight(self) -> float | Tensor:
        """What the current micro-batch's loss is multiplied by; valid once compute_loss has returned it."""
        return self.weighing.factor()

    @property
    def loss_takes_total(self) -> bool | None:
        """Whether losses are divided by the items of the whole step; None: an override decides each time."""
        if type(self).compute_loss is not Trainer.compute_loss:
            return None if losses.names_num_items(type(self).compute_loss) else False
        if self.compute_loss_func is not None:
            return losses.names_num_items(self.compute_loss_func)
        return self.label_smoother is None and self.model_accepts_loss_kwargs

    # Optimizer and schedule

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make what was not given to the constructor."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps, self.optimizer)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Make the optimizer, of `model` or else the Trainer's, unless there is one."""
        if self.optimizer is None:
            model = self.model if model is None else model
            wanted = self.optimizer_cls_and_kwargs
            chosen, settings = wanted or self.get_optimizer_cls_and_kwargs(self.args, model)
            settings = {"lr": self.args.learning_rate, **settings}
            decayed = self.get_decay_parameter_names(model)
            self.optimizer = optimizers.make_optimizer(model, decayed, self.args, chosen, settings)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """Make the schedule over so many optimizer steps, unless there is one."""
        if self.lr_scheduler is None:
            warmup = self.args.get_warmup_steps(num_training_steps)
            self.lr_scheduler = schedule.make_schedule(
                self.args.lr_scheduler_type,
                optimizer or self.optimizer,
                warmup,
                num_training_steps,
                self.args.lr_scheduler_kwargs,
            )
        return self.lr_scheduler

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[type[Optimizer], dict[str, Any]]:
        """The class and settings that ``args.optim`` stands for."""
        return optimizers.optimizer_class(args)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that weight decay applies to."""
        return optimizers.decayed_names(model)

    @property
    def learning_rate(self) -> float:
        """Of the first parameter group, for the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    # Evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate; each sample counts once, whatever the number of ranks.

        Args:
            eval_dataset: instead of the constructor's; a dict of several gives ``eval_<name>_...``.
            ignore_keys: entries of the outputs to leave out.
            metric_key_prefix: of the metrics' names.

        Returns:
            the metrics, the same on every rank.
        """
        given = eval_dataset is not None
        dataset = eval_dataset if given else self.eval_dataset
        if isinstance(dataset, dict):
            metrics: dict[str, float] = {}
            for name, each in dataset.items():
                part = each if given else name  # get_eval_dataloader finds it by its name
                metrics |= self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        loss_only = self.args.prediction_loss_only or self.compute_metrics is None
        with self.memory.stage("eval") as memory:
            output = self.evaluation_loop(
                self.get_eval_dataloader(eval_dataset),
                "Evaluation",
                loss_only,
                ignore_keys,
                metric_key_prefix,
            )
        output.metrics.update(memory)
        self.log(output.metrics)
        self.fire("on_evaluate", metrics=output.metrics)
        return output.metrics

    def _evaluate(
        self, trial: Any = None, ignore_keys_for_eval: list[str] | None = None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """An evaluation that is due in training."""
        return self.evaluate(ignore_keys=ignore_keys_for_eval)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Whether metrics are the best so far; notes them in the state if so."""
        return checkpoints.note_best(self, metrics)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predict; returns predictions and labels of the whole data set in its order, on every rank."""
        with self.memory.stage("test") as memory:
            loader = feeds.eval_loader_of(self.get_test_dataloader(test_dataset), self.args)
            output = evaluation.evaluate(self, loader, False, ignore_keys, metric_key_prefix, everywhere=True)
        output.metrics.update(memory)
        self.fire("on_predict", metrics=output.metrics)
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run the model over a loader.

        Predictions come back on rank 0 alone, where compute_metrics works on them; without
        compute_metrics, on every rank.
        """
        loader = feeds.eval_loader_of(dataloader, self.args)
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        logger.info("%s: %d samples", description, self.num_examples(loader))
        everywhere = self.compute_metrics is None
        return evaluation.evaluate(self, loader, loss_only, ignore_keys, metric_key_prefix, everywhere)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Loss, predictions and labels of one batch; each may be None."""
        return evaluation.predict_batch(self, model, inputs, prediction_loss_only, ignore_keys)

    # Logs, files, callbacks

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the epoch to `logs`, put them into the history, and tell the callbacks."""
        logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.fire("on_log", logs=logs)

    def fire(self, event: str, **kwargs: Any) -> None:
        """Call `event` of every callback."""
        self.control = self.callback_handler.call_event(event, self.args, self.state, self.control, **kwargs)

    def add_callback(self, callback: Any) -> None:
        """Add a callback, or an instance of a callback class."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Take out a callback, or the first of a class, and return it."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Take out a callback, or the first of a class."""
        self.callback_handler.pop_callback(callback)

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.args.process_index == 0

    def is_local_process_zero(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.args.local_process_index == 0

    # The model

    def wrap_model(self) -> nn.Module:
        """The model in DistributedDataParallel, as the ddp_* arguments say; a single rank's as it is."""
        return self._wrap_model(self.model)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        alone = self.args.world_size == 1  # there is nothing to average
        return model if alone else DistributedDataParallel(model, **setup.ddp_settings(self.args))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Read the weights of a checkpoint into the model, before it is wrapped."""
        load_model(model or self.model, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        """Read the weights of the best checkpoint into the model."""
        checkpoints.load_best(self)

    def _take_model(self, model: nn.Module) -> None:
        """Take a model out of what it is in, move it to the device, set it up, and look at what it takes."""
        model = setup.unwrapped(model)
        self.model = self.model_wrapped = model.to(self.args.device)
        if self.args.gradient_checkpointing:
            setup.enable_gradient_checkpointing(model, self.args.gradient_checkpointing_kwargs)
        config: Any = getattr(model, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = self.args.use_cache
        if self.args.torch_compile:
            setup.compile_model(model, self.args)
        self.model_accepts_loss_kwargs = losses.takes_num_items(model)
        self.model_shifts_labels = losses.shifts_labels(model)
        self.can_return_loss = losses.returns_loss_unasked(model)
        self.label_names = self.args.label_names or losses.label_names_of(model)
        self.label_smoother = smoother_for(model, self.args.label_smoothing_factor)
