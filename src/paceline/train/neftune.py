"""NEFTune: noise on the input embeddings in training (Jain et al., 2023)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ArgumentError


@contextmanager
def noisy_embeddings(model: nn.Module, alpha: float | None) -> Iterator[None]:
    """A block in which the embeddings of `model` are noisy whenever it is in training mode.

    The noise is uniform in plus or minus alpha / sqrt(length * width), drawn for each rank from the step's
    generator.

    Args:
        model: has get_input_embeddings, or its base model has (PEFT).
        alpha: None for no noise.

    Raises:
        ArgumentError: the model does not say which its embeddings are.
    """
    if alpha is None:
        yield
        return

    def add_noise(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if not module.training:
            return output
        bound = alpha / math.sqrt(output.shape[-2] * output.shape[-1])
        return output + torch.empty_like(output).uniform_(-bound, bound)

    handle = _embeddings(model).register_forward_hook(add_noise)
    try:
        yield
    finally:
        handle.remove()


def _embeddings(model: nn.Module) -> nn.Module:
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if not hasattr(base, "get_input_embeddings"):
        raise ArgumentError(
            f"neftune_noise_alpha is set, but {type(base).__name__} has no get_input_embeddings, which gives "
            f"the layer that the noise goes to; add that method, or leave neftune_noise_alpha out"
        )
    layer: nn.Module = base.get_input_embeddings()
    return layer
