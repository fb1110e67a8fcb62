"""paceline: data-parallel training on PyTorch that is right, fast and never silently stuck.

    from paceline import DistributedDataParallel      in place of torch's class
    from paceline import Trainer, TrainingArguments   in place of Hugging Face's
    paceline launch --num_processes 4 train.py        in place of torchrun

Names are loaded when they are first used, so that importing the package costs little.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "DistributedDataParallel": "paceline.engine.ddp",
    "SyncBatchNorm": "paceline.engine.sync_batchnorm",
    "verify_replicas": "paceline.engine.verify",
    "Trainer": "paceline.train.trainer",
    "TrainingArguments": "paceline.train.arguments",
    "Seq2SeqTrainer": "paceline.train.seq2seq",
    "Seq2SeqTrainingArguments": "paceline.train.seq2seq",
    "TrainerCallback": "paceline.train.callbacks",
    "ArgumentParser": "paceline.train.parser",
    "DistributedSampler": "paceline.train.sampler",
    "PacelineError": "paceline.errors",
    "ArgumentError": "paceline.errors",
    "BackendUnavailableError": "paceline.errors",
    "ReplicaMismatchError": "paceline.errors",
    "UnusedParametersError": "paceline.errors",
    "GradientError": "paceline.errors",
    "GraphChangedError": "paceline.errors",
    "CommunicationError": "paceline.errors",
    "CollectiveTimeoutError": "paceline.errors",
    "PeerLostError": "paceline.errors",
    "RanksOutOfStepError": "paceline.errors",
    "PeerFailedError": "paceline.errors",
    "NonFiniteError": "paceline.errors",
    "CheckpointError": "paceline.errors",
    "LaunchError": "paceline.errors",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
