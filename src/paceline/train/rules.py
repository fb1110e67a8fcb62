"""What TrainingArguments may hold: spellings made uniform, contradictions refused, gaps admitted.

    normalise(args)   enums and JSON to plain values; defaults that depend on other fields
    check(args)       raises ArgumentError for what cannot work

A field that is not served yet raises when it is set to anything but its default, so
that no setting is ever ignored. The table `NOT_SERVED` is the whole list.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from paceline.environment import rank_place
from paceline.errors import ArgumentError

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
)
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "sgd", "adagrad", "rmsprop")
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
_REPORTING = ("run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id")

# Fields of transformers 5.18 that nothing here serves yet, and why or what to use instead.
NOT_SERVED = {
    "optim_target_modules": "low-rank optimizers are not built in; give Trainer(optimizers=...) your own",
    "average_tokens_across_devices": "the loss is always averaged over all ranks; leave it True",
    "label_smoothing_factor": "give the Trainer a compute_loss_func with cross_entropy(label_smoothing=...)",
    "fp16": "loss scaling is not built in yet; use bf16=True",
    "bf16_full_eval": "evaluation runs in the precision of training",
    "fp16_full_eval": "evaluation runs in the precision of training",
    "tf32": "set torch.backends.cuda.matmul.allow_tf32 in the script",
    "torch_compile": "call model.compile() before making the Trainer",
    "torch_compile_backend": "call model.compile(backend=...) before making the Trainer",
    "torch_compile_mode": "call model.compile(mode=...) before making the Trainer",
    "use_liger_kernel": "apply the kernels to the model before making the Trainer",
    "liger_kernel_config": "apply the kernels to the model before making the Trainer",
    "neftune_noise_alpha": "NEFTune is not built in yet",
    "auto_find_batch_size": "set per_device_train_batch_size and gradient_accumulation_steps",
    "include_num_input_tokens_seen": "tokens are not counted yet",
    **dict.fromkeys(_REPORTING, "no reporting service is built in yet; add a callback"),
    "eval_do_concat_batches": "predictions are always joined",
    "include_for_metrics": "compute_metrics gets predictions and labels",
    "batch_eval_metrics": "compute_metrics is called once, on everything",
    "enable_jit_checkpoint": "saving on SIGTERM is not built in yet",
    **dict.fromkeys(_HUB, "the Hub is not served; upload the finished folder with huggingface_hub"),
    "ignore_data_skip": "finding the place in the data takes no time here; leave it False",
    "restore_callback_states_from_checkpoint": "callbacks' own state is not saved yet",
    "full_determinism": "call torch.use_deterministic_algorithms(True) in the script",
    "accelerator_config": "Accelerate is not used",
    "parallelism_config": "only data parallelism is served",
    "length_column_name": "sampling by length is not built in yet",
    "dataloader_in_order": "the order of samples must be kept, or resuming would not be exact",
    "fsdp": "sharded models are not served yet",
    "fsdp_config": "sharded models are not served yet",
    "deepspeed": "DeepSpeed is not served",
    "debug": "debug modes are not built in",
    "skip_memory_metrics": "memory is not measured yet",
}

_CHOICES = {
    "lr_scheduler_type": SCHEDULES,
    "optim": OPTIMIZERS,
    "logging_strategy": INTERVALS,
    "eval_strategy": INTERVALS,
    "save_strategy": SAVE_INTERVALS,
    "log_level": LOG_LEVELS,
    "log_level_replica": LOG_LEVELS,
    "train_sampling_strategy": ("random", "sequential"),
}
_DICTS = (
    "lr_scheduler_kwargs",
    "gradient_checkpointing_kwargs",
    "accelerator_config",
    "fsdp_config",
    "deepspeed",
)
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
    "seed": 0,
}


def normalise(args: TrainingArguments) -> None:
    """Bring `args` to plain strings, numbers and dicts, and fill defaults that hang on other fields."""
    for name in (*_CHOICES, "hub_strategy"):
        setattr(args, name, _plain(getattr(args, name)))
    for name in _DICTS:
        setattr(args, name, _parsed(name, getattr(args, name)))
    args.output_dir = os.path.expanduser(args.output_dir or "trainer_output")
    args.report_to = _services(args.report_to)
    args.include_num_input_tokens_seen = _spelled(args.include_num_input_tokens_seen)
    args.max_grad_norm = args.max_grad_norm or 0.0
    if args.disable_tqdm is None:
        args.disable_tqdm = logging.getLogger("paceline").getEffectiveLevel() > logging.WARNING
    if args.eval_strategy != "no":
        args.do_eval = True
    if args.eval_strategy == "steps" and not args.eval_steps:
        args.eval_steps = args.logging_steps
    if args.load_best_model_at_end and args.metric_for_best_model is None:
        args.metric_for_best_model = "loss"
    if args.greater_is_better is None and args.metric_for_best_model is not None:
        args.greater_is_better = not args.metric_for_best_model.endswith("loss")


def check(args: TrainingArguments) -> None:
    """Refuse what cannot work.

    Raises:
        ArgumentError: naming the field, its value and what to write instead.
    """
    _check_served(args)
    _check_values(args)
    _check_intervals(args)
    _check_best(args)
    _check_data(args)
    _check_place(args)


def _check_served(args: TrainingArguments) -> None:
    for each in fields(args):
        value, reason = getattr(args, each.name), NOT_SERVED.get(each.name)
        if reason is not None and value != _default(each):
            raise ArgumentError(f"{each.name}={value!r} is not supported by paceline: {reason}")
    if args.report_to:
        raise ArgumentError(
            f"report_to={args.report_to!r} is not supported by paceline yet: write 'none', and add a "
            f"callback with on_log to send logs elsewhere"
        )


def _check_values(args: TrainingArguments) -> None:
    for name, allowed in _CHOICES.items():
        if getattr(args, name) not in allowed:
            raise ArgumentError(f"{name}={getattr(args, name)!r}, but it must be one of {', '.join(allowed)}")
    for name, least in _AT_LEAST.items():
        if not getattr(args, name) >= least:
            raise ArgumentError(f"{name}={getattr(args, name)!r}, but it must be at least {least}")
    for name in ("ddp_bucket_cap_mb", "torch_empty_cache_steps", "eval_accumulation_steps"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ArgumentError(f"{name}={value!r}, but it must be above 0; leave it out for the default")
    if args.max_grad_norm < 0:
        raise ArgumentError(
            f"max_grad_norm={args.max_grad_norm!r}, but it must not be negative; 0 clips nothing"
        )


def _check_intervals(args: TrainingArguments) -> None:
    for kind in ("logging", "eval", "save"):
        steps = getattr(args, f"{kind}_steps")
        if getattr(args, f"{kind}_strategy") != "steps":
            continue
        if not steps or steps < 0:
            raise ArgumentError(f"{kind}_strategy='steps' needs {kind}_steps above 0, but it is {steps!r}")
        if steps > 1 and steps != int(steps):
            raise ArgumentError(f"{kind}_steps={steps!r}, but above 1 it must be a whole number")
        if steps >= 1:
            setattr(args, f"{kind}_steps", int(steps))


def _check_best(args: TrainingArguments) -> None:
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


def _multiple(larger: float, smaller: float | None) -> bool:
    """Whether `larger` is a whole multiple; shares of all steps (below 1) compare among themselves."""
    if not smaller or (larger < 1) != (smaller < 1):
        return False
    return round(larger * 1_000_000) % round(smaller * 1_000_000) == 0


def _default(each: Any) -> Any:
    return each.default if each.default is not MISSING else each.default_factory()


def _plain(value: Any) -> Any:
    """An enum's value (scripts pass Hugging Face's enums), anything else as it is."""
    return getattr(value, "value", value)


def _parsed(name: str, value: Any) -> Any:
    """A dict given as JSON text, as command lines do; other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ArgumentError(f"{name}={value!r} is neither a dict nor JSON for one: {error}") from error


def _services(value: str | list[str] | None) -> list[str]:
    names = [value] if isinstance(value, str) else list(value or [])
    return [] if names == ["none"] else names


def _spelled(value: str | bool) -> str:
    if isinstance(value, bool):
        return "all" if value else "no"
    return value
