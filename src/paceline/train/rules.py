"""What TrainingArguments may hold: spellings made uniform, contradictions refused, gaps admitted.

    normalise(args)   enums and JSON to plain values; defaults that depend on other fields
    check(args)       raises ArgumentError for what cannot work

A field that is not served yet raises when it is set to anything but its default, so
that no setting is ever ignored. The table `NOT_SERVED` is the whole list.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

import torch

from paceline.environment import rank_place
from paceline.errors import ArgumentError
from paceline.train import overflow, reporters
from paceline.train.accelerator_config import AcceleratorConfig, check_config, read_config

if TYPE_CHECKING:
    from paceline.train.arguments import TrainingArguments

INTERVALS = ("no", "steps", "epoch")
SAVE_INTERVALS = ("no", "steps", "epoch", "best")
SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "reduce_lr_on_plateau",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
)
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "sgd", "adagrad", "rmsprop", "adafactor")
ORDERS = ("random", "sequential", "group_by_length")
TOKEN_COUNTS = ("no", "all", "non_padding")
DEBUG_MODES = (overflow.NAME,)
MORE_FOR_METRICS = ("inputs", "loss")
LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")

_HUB = (
    "push_to_hub",
    "hub_token",
    "hub_private_repo",
    "hub_model_id",
    "hub_strategy",
    "hub_always_push",
    "hub_revision",
)

# Fields of transformers 5.18 that nothing here serves yet, and why or what to use instead.
NOT_SERVED = {
    "optim_target_modules": "low-rank optimizers are not built in; give Trainer(optimizers=...) your own",
    "use_liger_kernel": "apply the kernels to the model before making the Trainer",
    "liger_kernel_config": "apply the kernels to the model before making the Trainer",
    "trackio_static_space_id": "call trackio.freeze when training is done",
    **dict.fromkeys(_HUB, "the Hub is not served; upload the finished folder with huggingface_hub"),
    "parallelism_config": "only data parallelism is served",
    "fsdp": "sharded models are not served yet",
    "fsdp_config": "sharded models are not served yet",
    "deepspeed": "DeepSpeed is not served",
}

_CHOICES = {
    "lr_scheduler_type": SCHEDULES,
    "optim": OPTIMIZERS,
    "logging_strategy": INTERVALS,
    "eval_strategy": INTERVALS,
    "save_strategy": SAVE_INTERVALS,
    "log_level": LOG_LEVELS,
    "log_level_replica": LOG_LEVELS,
    "train_sampling_strategy": ORDERS,
    "include_num_input_tokens_seen": TOKEN_COUNTS,
}
_AT_LEAST = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "ddp_timeout": 1,
    "dataloader_num_workers": 0,
    "warmup_steps": 0,
    "learning_rate": 0,
    "weight_decay": 0,
    "num_train_epochs": 0,
    "label_smoothing_factor": 0,
    "max_grad_norm": 0,
    "seed": 0,
}
_ABOVE_ZERO_OR_NONE = ("ddp_bucket_cap_mb", "torch_empty_cache_steps", "eval_accumulation_steps")


def normalise(args: TrainingArguments) -> None:
    """Bring `args` to plain strings, numbers and dicts, and fill defaults that hang on other fields."""
    for name in (*_CHOICES, "hub_strategy"):
        setattr(args, name, _plain(getattr(args, name)))
    for name in args._VALID_DICT_FIELDS:
        setattr(args, name, _parsed(name, getattr(args, name)))
    args.output_dir = os.path.expanduser(args.output_dir or "trainer_output")
    args.report_to = reporters.names_of(args.report_to)
    debug = args.debug or []  # Hugging Face's parser leaves None where the option is not given
    args.debug = [_plain(each) for each in (debug.split() if isinstance(debug, str) else debug)]
    args.include_num_input_tokens_seen = _spelled(args.include_num_input_tokens_seen)
    args.max_grad_norm = args.max_grad_norm or 0.0
    args.eval_delay = args.eval_delay or 0
    if args.disable_tqdm is None:
        args.disable_tqdm = logging.getLogger("paceline").getEffectiveLevel() > logging.WARNING
    _normalise_compilation(args)
    _normalise_accelerator_config(args)
    _normalise_evaluation(args)


def _normalise_compilation(args: TrainingArguments) -> None:
    if args.torch_compile_mode is not None or args.torch_compile_backend is not None:
        args.torch_compile = True
    if args.torch_compile and args.torch_compile_backend is None:
        args.torch_compile_backend = "inductor"


def _normalise_accelerator_config(args: TrainingArguments) -> None:
    config: Any = read_config(args.accelerator_config)
    check_config(config, args.gradient_accumulation_steps)
    args.accelerator_config = config
    args.gradient_accumulation_steps = config.num_steps or args.gradient_accumulation_steps


def config_of(args: TrainingArguments) -> AcceleratorConfig:
    """``accelerator_config`` as the object that `normalise` made it."""
    config: Any = args.accelerator_config
    return config or AcceleratorConfig()


def _normalise_evaluation(args: TrainingArguments) -> None:
    if args.eval_strategy != "no":
        args.do_eval = True
    if args.eval_strategy == "steps" and not args.eval_steps:
        args.eval_steps = args.logging_steps
    needs_metric = args.load_best_model_at_end or args.lr_scheduler_type == "reduce_lr_on_plateau"
    if needs_metric and args.metric_for_best_model is None:
        args.metric_for_best_model = "loss"
    if args.greater_is_better is None and args.metric_for_best_model is not None:
        args.greater_is_better = not args.metric_for_best_model.endswith("loss")


def check(args: TrainingArguments) -> None:
    """Refuse what cannot work.

    Raises:
        ArgumentError: naming the field, its value and what to write instead.
    """
    check_fields(args, [each.name for each in fields(args)])
    for kind in ("logging", "eval", "save"):
        check_interval(args, kind)
    _check_precision(args)
    _check_best(args)
    _check_data(args)
    _check_place(args)


def check_fields(args: TrainingArguments, names: Iterable[str]) -> None:
    """Refuse what these fields cannot be, whatever the others are.

    Raises:
        ArgumentError: naming the field.
    """
    names = set(names)
    _check_served(args, names)
    for name, allowed in _CHOICES.items():
        if name in names and getattr(args, name) not in allowed:
            raise ArgumentError(f"{name}={getattr(args, name)!r}, but it must be one of {', '.join(allowed)}")
    for name, least in _AT_LEAST.items():
        if name in names and not getattr(args, name) >= least:
            raise ArgumentError(f"{name}={getattr(args, name)!r}, but it must be at least {least}")
    for name in names.intersection(_ABOVE_ZERO_OR_NONE):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ArgumentError(f"{name}={value!r}, but it must be above 0; leave it out for the default")
    unknown = set(args.include_for_metrics) - set(MORE_FOR_METRICS)
    if unknown:
        raise ArgumentError(
            f"include_for_metrics={args.include_for_metrics!r}, but it may hold "
            f"{' and '.join(MORE_FOR_METRICS)}"
        )
    unknown = set(args.debug) - set(DEBUG_MODES)
    if unknown:
        raise ArgumentError(f"debug={' '.join(args.debug)!r}, but it may hold {' and '.join(DEBUG_MODES)}")
    if not args.skip_memory_metrics and importlib.util.find_spec("psutil") is None:
        raise ArgumentError("skip_memory_metrics=False needs psutil; run `pip install psutil`")
    if "report_to" in names:
        reporters.check_installed(list(args.report_to or []))


def check_interval(args: TrainingArguments, kind: str) -> None:
    """Refuse steps that `kind` (logging, eval or save) cannot go by; whole numbers become ints.

    Raises:
        ArgumentError: naming the field.
    """
    steps = getattr(args, f"{kind}_steps")
    if getattr(args, f"{kind}_strategy") != "steps":
        return
    if not steps or steps < 0:
        raise ArgumentError(f"{kind}_strategy='steps' needs {kind}_steps above 0, but it is {steps!r}")
    if steps > 1 and steps != int(steps):
        raise ArgumentError(f"{kind}_steps={steps!r}, but above 1 it must be a whole number")
    if steps >= 1:
        setattr(args, f"{kind}_steps", int(steps))


def _check_served(args: TrainingArguments, names: set[str]) -> None:
    for each in fields(args):
        value, reason = getattr(args, each.name), NOT_SERVED.get(each.name)
        if each.name in names and reason is not None and value != _default(each):
            raise ArgumentError(f"{each.name}={value!r} is not supported by paceline: {reason}")


def _check_precision(args: TrainingArguments) -> None:
    if args.fp16 and args.bf16:
        raise ArgumentError("fp16 and bf16 are both True; set one of them")
    if args.fp16_full_eval and args.bf16_full_eval:
        raise ArgumentError("fp16_full_eval and bf16_full_eval are both True; set one of them")
    if args.label_smoothing_factor >= 1:
        raise ArgumentError(f"label_smoothing_factor={args.label_smoothing_factor!r}, but it must be below 1")
    if args.tf32 and not torch.cuda.is_available():
        raise ArgumentError("tf32=True, but there is no CUDA device here; leave it out")


def _check_best(args: TrainingArguments) -> None:
    if args.lr_scheduler_type == "reduce_lr_on_plateau" and args.eval_strategy == "no":
        raise ArgumentError(
            "lr_scheduler_type='reduce_lr_on_plateau' goes by an evaluation metric; set eval_strategy"
        )
    if args.save_strategy == "best" and args.metric_for_best_model is None:
        raise ArgumentError("save_strategy='best' needs metric_for_best_model, such as 'loss'")
    if args.save_strategy == "best" and args.eval_strategy == "no":
        raise ArgumentError("save_strategy='best' needs eval_strategy='steps' or 'epoch'")
    if not args.load_best_model_at_end or args.save_strategy == "best":
        return
    if args.eval_strategy != args.save_strategy:
        raise ArgumentError(
            f"load_best_model_at_end needs eval_strategy and save_strategy to be the same, but they are "
            f"{args.eval_strategy!r} and {args.save_strategy!r}; or write save_strategy='best'"
        )
    if args.eval_strategy == "no":
        raise ArgumentError("load_best_model_at_end needs evaluations; set eval_strategy and save_strategy")
    if args.eval_strategy == "steps" and not _multiple(args.save_steps, args.eval_steps):
        raise ArgumentError(
            f"load_best_model_at_end needs save_steps to be a multiple of eval_steps, "
            f"but they are {args.save_steps} and {args.eval_steps}"
        )


def _check_data(args: TrainingArguments) -> None:
    if args.dataloader_num_workers == 0:
        for name in ("dataloader_prefetch_factor", "dataloader_multiprocessing_context"):
            if getattr(args, name) is not None:
                raise ArgumentError(f"{name} needs dataloader_num_workers above 0")
        if args.dataloader_persistent_workers:
            raise ArgumentError("dataloader_persistent_workers needs dataloader_num_workers above 0")


def _check_place(args: TrainingArguments) -> None:
    here = rank_place().local_rank
    if args.local_rank not in (-1, here):
        raise ArgumentError(
            f"local_rank={args.local_rank}, but the environment says {here}; start the script with "
            f"`paceline launch` or torchrun, and leave local_rank out"
        )


def own_batch(args: TrainingArguments, size: int) -> int:
    """Samples of one rank's batch where `size` is what a per_device field says."""
    return size // args.world_size if config_of(args).split_batches else size


def check_batch_split(args: TrainingArguments) -> None:
    """Refuse batch sizes that split_batches cannot split; needs the process group.

    Raises:
        ArgumentError: naming the field.
    """
    if not config_of(args).split_batches:
        return
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        if getattr(args, name) % args.world_size:
            raise ArgumentError(
                f"accelerator_config: split_batches=True needs {name} to be a multiple of the "
                f"{args.world_size} ranks, but it is {getattr(args, name)}"
            )


def _multiple(larger: float, smaller: float | None) -> bool:
    """Whether `larger` is a whole multiple; shares of all steps (below 1) compare among themselves."""
    if not smaller or (larger < 1) != (smaller < 1):
        return False
    return round(larger * 1_000_000) % round(smaller * 1_000_000) == 0


def _default(each: Any) -> Any:
    return each.default if each.default is not MISSING else each.default_factory()


class Choice(str):
    """A word out of a fixed set: a string that has ``value``, as the members of Hugging Face's enums do."""

    @property
    def value(self) -> str:
        """The word."""
        return str(self)


def _plain(value: Any) -> Any:
    """A word, given as such or as an enum's member; anything else as it is."""
    value = getattr(value, "value", value)
    return Choice(value) if isinstance(value, str) else value


def _parsed(name: str, value: Any) -> Any:
    """A dict given as JSON text, as command lines do; other values (names of files) as they are."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ArgumentError(f"{name}={value!r} is neither a dict nor JSON for one: {error}") from error


def _spelled(value: str | bool) -> str:
    if isinstance(value, bool):
        return "all" if value else "no"
    return value
