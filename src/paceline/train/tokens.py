"""Counting the tokens that a run has been given (``include_num_input_tokens_seen``)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from paceline.train.feeds import StepData
    from paceline.train.trainer import Trainer

logger = logging.getLogger(__name__)


def count_tokens(trainer: Trainer, step: StepData) -> int:
    """Input tokens of a step over all ranks, the same on every rank; 0 if they are not to be counted."""
    kind = trainer.args.include_num_input_tokens_seen
    if kind == "no":
        return 0
    own = sum(
        _tokens_of(trainer, each.inputs, kind == "non_padding") for each in step.micro_batches if each.samples
    )
    total = torch.tensor(own, device=trainer.args.device)
    return int(trainer.collectives.sum(total, "counting input tokens"))


def _tokens_of(trainer: Trainer, inputs: Any, without_padding: bool) -> int:
    name = getattr(trainer.model, "main_input_name", "input_ids")
    tokens = inputs.get(name) if isinstance(inputs, Mapping) else None
    if tokens is None:
        logger.warning("include_num_input_tokens_seen: batches have no %r (main_input_name)", name)
        return 0
    if not without_padding:
        return int(tokens.numel())
    if "attention_mask" in inputs:
        return int(inputs["attention_mask"].sum())
    padding = getattr(trainer.processing_class, "pad_token_id", None)
    if padding is None:
        logger.warning("include_num_input_tokens_seen: batches have no attention_mask, so padding counts too")
        return int(tokens.numel())
    return int(tokens.ne(padding).sum())
