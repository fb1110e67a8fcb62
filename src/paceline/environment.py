"""The only reader of ``os.environ``.

A launcher (``paceline launch``, torchrun, ``accelerate launch``) tells a process
its place through environment variables. Everything else in paceline asks here, so
that the list of variables that matter is this file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import ArgumentError

RECORDS = "PACELINE_RECORDS"  # a folder, or "off"


@dataclass(frozen=True)
class RankPlace:
    """Where this process stands among the ranks that were started together."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def launched() -> bool:
    """Whether a multi-process launcher started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank_place() -> RankPlace:
    """This process's place; rank 0 of 1 when no launcher started it.

    Raises:
        ArgumentError: a variable is set to something that is not a whole number.
    """
    if not launched():
        return RankPlace(rank=0, world_size=1, local_rank=0, local_world_size=1)
    rank, world_size = _integer("RANK"), _integer("WORLD_SIZE")
    return RankPlace(
        rank=rank,
        world_size=world_size,
        local_rank=_integer("LOCAL_RANK", default=rank),
        local_world_size=_integer("LOCAL_WORLD_SIZE", default=world_size),
    )


def cpu_requested() -> bool:
    """Whether the launcher was told to leave accelerators alone (``--cpu``)."""
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "y", "on")


def requested_precision() -> str:
    """What the launcher was told to compute the forward in: "bf16", "fp16", or "no"."""
    wanted = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    return wanted if wanted in ("bf16", "fp16") else "no"


def tensorboard_folder() -> str | None:
    """Where the user wants TensorBoard's files, if they say so."""
    folder = os.environ.get("TENSORBOARD_LOGGING_DIR")
    return os.path.expanduser(folder) if folder else None


def wandb_project() -> str:
    """The Weights & Biases project that the user names, or the usual one."""
    return os.environ.get("WANDB_PROJECT", "huggingface")


def mlflow_experiment() -> str | None:
    """The MLflow experiment that the user names, if any."""
    return os.environ.get("MLFLOW_EXPERIMENT_NAME")


def record_folder() -> str | None:
    """Where this rank writes down what it does: named by the launcher, or by the user, or nowhere."""
    folder = os.environ.get(RECORDS, "")
    return None if folder in ("", "off") else folder


def snapshot() -> dict[str, str]:
    """A copy of the whole environment, to build a child's environment from."""
    return dict(os.environ)


def set_variables(values: Mapping[str, str]) -> None:
    """Set variables of this process; only commands do this, never an import."""
    os.environ.update(values)


def replace_variables(values: Mapping[str, str]) -> None:
    """Give this process another environment; only a process that has just been forked does this."""
    os.environ.clear()
    os.environ.update(values)


def _integer(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ArgumentError(
            f"environment variable {name} is {text!r}, but a whole number is needed; "
            f"start the script with `paceline launch`, or unset RANK and WORLD_SIZE to run on one rank"
        ) from None
