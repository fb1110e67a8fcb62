"""What the Trainer's constructor makes of what it is given."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import ArgumentError
from paceline.train import rules
from paceline.train.arguments import TrainingArguments
from paceline.train.batches import default_collate
from paceline.train.state import TrainerState


def checked_arguments(args: TrainingArguments | None) -> TrainingArguments:
    """The arguments, or default ones."""
    args = TrainingArguments("tmp_trainer") if args is None else args
    if not isinstance(args, TrainingArguments):
        raise ArgumentError(
            f"args is a {type(args).__module__}.{type(args).__name__}; "
            f"write `from paceline import Trainer, TrainingArguments`, which has the same fields"
        )
    rules.normalise(args)  # a field may have been set after construction
    rules.check(args)
    return args


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that the user wrote, which says what its forward takes and how its state is called.

    `torch.compile(model)` hides both. The module inside is compiled in place instead, in the same way.

    Raises:
        ArgumentError: the model is in a DistributedDataParallel already.
    """
    if isinstance(model, DistributedDataParallel):
        raise ArgumentError(
            "the model is in a DistributedDataParallel already; pass the module inside, as in "
            "Trainer(model.module), and the Trainer wraps it as the ddp_* arguments say"
        )
    inside: Any = getattr(model, "_orig_mod", None)
    if not isinstance(inside, nn.Module):
        return model
    compiled: Any = model
    inside._compiled_call_impl = compiled.dynamo_ctx(inside._call_impl)
    return inside


def set_log_level(args: TrainingArguments) -> None:
    """The level of this package's logger; "passive" leaves it as it is."""
    name = args.log_level if args.should_log else args.log_level_replica
    if name != "passive":
        logging.getLogger("paceline").setLevel(logging.DEBUG if name == "detail" else name.upper())


def model_of(model: nn.Module | None, model_init: Callable[[], nn.Module] | None) -> nn.Module:
    """The model, or what model_init makes."""
    if (model is None) == (model_init is None):
        raise ArgumentError("pass either model or model_init to the Trainer")
    made = model_init() if model is None and model_init is not None else model
    if not isinstance(made, nn.Module):
        raise ArgumentError(f"the model is a {type(made).__name__}, but a torch.nn.Module is needed")
    return made


def default_collator(processing_class: Any) -> Any:
    """Pads with a tokenizer, stacks without."""
    if hasattr(processing_class, "pad"):
        return importlib.import_module("transformers").DataCollatorWithPadding(processing_class)
    return default_collate


def enable_gradient_checkpointing(model: nn.Module, settings: Any) -> None:
    """Switch it on in a model that can."""
    if not hasattr(model, "gradient_checkpointing_enable"):
        raise ArgumentError(
            f"gradient_checkpointing=True, but {type(model).__name__} has no gradient_checkpointing_enable; "
            f"call torch.utils.checkpoint.checkpoint in its forward instead"
        )
    enable: Any = model.gradient_checkpointing_enable
    enable(**({"gradient_checkpointing_kwargs": settings} if settings else {}))


class TrainingMode:
    """Switches a model to training, every module of it.

    Before each micro-batch, because callbacks and losses of the user's may have switched to evaluation;
    ``model.train()`` itself takes longer than a small step where there are many modules, so their flags are
    read first.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._modules: list[nn.Module] = []

    def switch_on(self, model: nn.Module) -> None:
        """Call ``model.train()`` the first time, and later unless all modules are training."""
        if self._model is not model:
            self._model, self._modules = model, list(model.modules())
            model.train()  # it may be the model's own, which keeps some modules as they are
        for module in self._modules:
            if not module.training:
                model.train()
                return


def compile_model(model: nn.Module, args: TrainingArguments) -> None:
    """Let torch.compile compile the forward, in place, so that names and state stay what they are."""
    if getattr(model, "_compiled_call_impl", None) is None:
        model.compile(backend=args.torch_compile_backend, mode=args.torch_compile_mode)


def fresh_state(args: TrainingArguments) -> TrainerState:
    """The state of a run that has not begun."""
    return TrainerState(
        train_batch_size=args.train_batch_size,
        is_local_process_zero=args.local_process_index == 0,
        is_world_process_zero=args.process_index == 0,
    )


def ddp_settings(args: TrainingArguments) -> dict[str, Any]:
    """What the ddp_* arguments say, in the wrapper's words; None means yes where it costs nothing."""
    return {
        "device_ids": None if args.device.type == "cpu" else [args.device.index],
        "bucket_cap_mb": args.ddp_bucket_cap_mb,
        "forward_sync_buffers": args.ddp_broadcast_buffers is not False,
        "find_unused_parameters": args.ddp_find_unused_parameters is not False,
        "static_graph": bool(args.ddp_static_graph),
    }
