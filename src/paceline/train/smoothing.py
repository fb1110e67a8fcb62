"""Label smoothing (Szegedy et al., "Rethinking the Inception Architecture", 2016)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.train.losses import IGNORED, shifts_labels

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LabelSmoother:
    """Cross-entropy against labels that leave some probability to all classes alike.

    Attributes:
        epsilon: how much of it.
        shifted: the label of token t+1 is what token t is to predict.
        ignore_index: labels that do not count.
    """

    epsilon: float
    shifted: bool = False
    ignore_index: int = IGNORED

    def __call__(
        self,
        model_output: Any,
        labels: Tensor,
        shift_labels: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
    ) -> Tensor:
        """The smoothed loss, a scalar.

        Args:
            model_output: has "logits" of shape (..., classes), or is a tuple that begins with them.
            labels: int64 of shape (...).
            shift_labels: instead of what this object was made with.
            num_items_in_batch: divide the sum by this; default: by the labels that count.
        """
        logits = model_output["logits"] if isinstance(model_output, Mapping) else model_output[0]
        if self.shifted if shift_labels is None else shift_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        labels = labels.reshape(logits.shape[:-1])
        total = nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).float(),
            labels.reshape(-1),
            ignore_index=self.ignore_index,
            label_smoothing=self.epsilon,
            reduction="sum",
        )
        items = labels.ne(self.ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        return total / (items.to(total.device) if isinstance(items, torch.Tensor) else items)


def smoother_for(model: nn.Module, epsilon: float) -> LabelSmoother | None:
    """What smooths the labels of `model`; None if nothing is to be, or (with a warning) can be."""
    if epsilon == 0:
        return None
    if getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification":
        logger.warning(
            "label_smoothing_factor=%s: labels of several classes at once cannot be smoothed; training goes "
            "on without",
            epsilon,
        )
        return None
    return LabelSmoother(epsilon, shifts_labels(model))
