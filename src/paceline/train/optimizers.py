"""The optimizers of the Trainer, and which parameters decay."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.errors import ArgumentError
from paceline.optim.adafactor import Adafactor

if TYPE_CHECKING:
    from paceline.train.arguments import TrainingArguments

# Decay pulls weights towards zero, which makes no sense for a bias or a norm's scale.
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|[._])norm(?:$|\.)", re.IGNORECASE)


def decayed_names(model: nn.Module) -> list[str]:
    """Names of the parameters that weight decay applies to: all but biases and norm weights."""
    norms = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm))
        for name, _ in module.named_parameters(recurse=False)
    }
    return [name for name, _ in model.named_parameters() if name not in norms and not _NO_DECAY.search(name)]


def parameter_groups(model: nn.Module, decayed: list[str], weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in a group that decays and one that does not."""
    names = set(decayed)
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {
            "params": [parameter for name, parameter in trainable if name in names],
            "weight_decay": weight_decay,
        },
        {"params": [parameter for name, parameter in trainable if name not in names], "weight_decay": 0.0},
    ]


def optimizer_class(args: TrainingArguments) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class and its settings for ``args.optim``.

    Raises:
        ArgumentError: ``optim_args`` is not of the form 'name=value,name=value'.
    """
    adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    classes: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
        "adamw_torch": (torch.optim.AdamW, adam),
        "adamw_torch_fused": (torch.optim.AdamW, {**adam, "fused": True}),
        "sgd": (torch.optim.SGD, {}),
        "adagrad": (torch.optim.Adagrad, {}),
        "rmsprop": (torch.optim.RMSprop, {}),
        "adafactor": (Adafactor, {"scale_parameter": False, "relative_step": False}),
    }
    chosen, settings = classes[args.optim]
    return chosen, {"lr": args.learning_rate, **settings, **_parse(args.optim_args)}


def make_optimizer(
    model: nn.Module, decayed: list[str], args: TrainingArguments, chosen: type[Any], settings: dict[str, Any]
) -> torch.optim.Optimizer:
    """An optimizer of class `chosen` over the trainable parameters of `model`.

    Raises:
        ArgumentError: the class does not take one of the settings.
    """
    groups: Any = parameter_groups(model, decayed, args.weight_decay)
    settings = dict(settings)
    for name in (
        "params",
        "optimizer_dict",
    ):  # groups that an overridden get_optimizer_cls_and_kwargs made itself
        groups = settings.pop(name, groups)
    try:
        optimizer: torch.optim.Optimizer = chosen(groups, **settings)
    except TypeError as error:
        raise ArgumentError(
            f"{chosen.__name__} does not take {settings!r} (see optim_args): {error}"
        ) from error
    return optimizer


def _parse(text: str | None) -> dict[str, Any]:
    pairs = [part.split("=", 1) for part in text.replace(" ", "").split(",")] if text else []
    if any(len(pair) != 2 for pair in pairs):
        raise ArgumentError(f"optim_args={text!r}, but it must look like 'momentum=0.9,nesterov=true'")
    return {name: _value(value) for name, value in pairs}


def _value(text: str) -> Any:
    """A number or a bool where the text is one."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
