"""The settings that Hugging Face hands to Accelerate, and what they mean where Accelerate is not used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from paceline.errors import ArgumentError


@dataclass
class AcceleratorConfig:
    """What ``TrainingArguments.accelerator_config`` may hold.

    Attributes:
        split_batches: per_device_train_batch_size and per_device_eval_batch_size are those of all
            ranks together, so they must be multiples of the number of ranks.
        dispatch_batches: True: rank 0 alone reads the data, and gives every rank its share. None or
            False: each rank reads its own share, also of a stream. The numbers are the same.
        even_batches: no sample is ever given twice to make shares even, whichever it is.
        use_seedable_sampler: the order is a function of the seed, whichever it is.
        non_blocking: copy batches to an accelerator without waiting (needs pinned memory to help).
        gradient_accumulation_kwargs: num_steps (instead of gradient_accumulation_steps) and
            sync_each_batch (average the gradients after each micro-batch).
        use_configured_state: a process group that is up is used as it is, whichever it is.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    gradient_accumulation_kwargs: dict[str, Any] | None = None
    use_configured_state: bool = False

    def to_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return deepcopy(asdict(self))

    @property
    def sync_each_batch(self) -> bool:
        """Whether gradients are averaged after each micro-batch."""
        return bool((self.gradient_accumulation_kwargs or {}).get("sync_each_batch", False))

    @property
    def num_steps(self) -> int | None:
        """Micro-batches of a step, if they are set here."""
        steps: int | None = (self.gradient_accumulation_kwargs or {}).get("num_steps")
        return steps


def read_config(value: Any) -> AcceleratorConfig:
    """A config of whatever `accelerator_config` was given as.

    Args:
        value: None, a dict, the name of a JSON file, or an object with the same fields (Hugging Face's).

    Raises:
        ArgumentError: an unknown entry, or a file that cannot be read.
    """
    if value is None or isinstance(value, AcceleratorConfig):
        return value or AcceleratorConfig()
    if isinstance(value, type):
        raise ArgumentError(f"accelerator_config is the class {value.__name__}; pass an object or a dict")
    entries = _entries(value)
    known = [each.name for each in fields(AcceleratorConfig)]
    unknown = sorted(set(entries) - set(known))
    if unknown:
        raise ArgumentError(
            f"accelerator_config has no {', '.join(map(repr, unknown))}; it has {', '.join(known)}"
        )
    return AcceleratorConfig(**entries)


def check_config(config: AcceleratorConfig, accumulation: int) -> None:
    """Refuse what is not served.

    Args:
        config: what was read.
        accumulation: ``gradient_accumulation_steps``, num_steps not yet applied.

    Raises:
        ArgumentError: naming the entry.
    """
    unknown = set(config.gradient_accumulation_kwargs or {}) - {"num_steps", "sync_each_batch"}
    if unknown:
        raise ArgumentError(
            f"accelerator_config: gradient_accumulation_kwargs has {', '.join(sorted(unknown))}, "
            f"but only num_steps and sync_each_batch are served"
        )
    if config.num_steps is not None and accumulation not in (1, config.num_steps):
        raise ArgumentError(
            f"accelerator_config: num_steps={config.num_steps} contradicts gradient_accumulation_steps="
            f"{accumulation}; set one of them"
        )


def _entries(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, (str, Path)):
        return dict(vars(value))
    try:
        entries: dict[str, Any] = json.loads(Path(value).read_text())
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"accelerator_config={str(value)!r} cannot be read as a JSON file: {error}"
        ) from error
    return entries
