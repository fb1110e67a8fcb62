"""Arguments that decide what a run computes, kept in its checkpoints, and compared when it is resumed.

A resumed run may have other ones: that is not refused, but said, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.train.arguments import TrainingArguments

# What a checkpoint's own state overrules: it is part of the optimizer's.
OF_OPTIMIZER = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
OF_ORDER = ("seed", "data_seed", "train_sampling_strategy", "dataloader_drop_last")
OTHERS = (
    "optim",
    "lr_scheduler_type",
    "warmup_steps",
    "max_steps",
    "num_train_epochs",
    "max_grad_norm",
    "label_smoothing_factor",
    "average_tokens_across_devices",
    "bf16",
    "fp16",
)


def to_be_kept(args: TrainingArguments) -> dict[str, Any]:
    """The arguments' values by name, as JSON can hold them."""
    return {name: getattr(args, name) for name in (*OF_OPTIMIZER, *OF_ORDER, *OTHERS)}


def in_words(kept: Mapping[str, Any], args: TrainingArguments) -> str:
    """What has changed since, and what comes of it; empty if nothing has."""
    now = to_be_kept(args)
    changed = [name for name in now if name in kept and kept[name] != now[name]]
    if not changed:
        return ""
    listed = ", ".join(f"{name}={now[name]!r} (was {kept[name]!r})" for name in changed)
    effects = ["these hold from here on"]
    if set(changed) & set(OF_OPTIMIZER):
        effects.append(f"except {_named(changed, OF_OPTIMIZER)}: the optimizer's state brings its own")
    if set(changed) & set(OF_ORDER):
        effects.append(
            f"with another {_named(changed, OF_ORDER)} the order of samples is another one, so in this epoch "
            "some may come twice and some not at all"
        )
    return f"{listed}; {'; '.join(effects)}"


def _named(changed: list[str], group: tuple[str, ...]) -> str:
    return ", ".join(name for name in changed if name in group)
