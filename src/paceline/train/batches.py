"""A batch: how it is made of samples, how many they are, and how it gets to the device."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class UsedEntries:
    """A collator that first drops the entries of dict samples that the model does not take."""

    def __init__(self, collate: Any, names: frozenset[str]) -> None:
        self.collate, self.names = collate, names

    def __call__(self, samples: list[Any]) -> Any:
        return self.collate([self._used(sample) for sample in samples])

    def _used(self, sample: Any) -> Any:
        if not isinstance(sample, Mapping):
            return sample
        return {name: value for name, value in sample.items() if name in self.names}


def used_entries(model: nn.Module, label_names: list[str]) -> frozenset[str] | None:
    """Entries of samples that the forward takes; None if it names none, so that all may be used."""
    parameters = inspect.signature(model.forward).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [each.name for each in parameters if each.kind in named]
    return frozenset([*names, *label_names, "label", "label_ids"]) if names else None


def batch_size_of(inputs: Any) -> int:
    """Samples of a batch: the length of the first tensor or array in it; 1 if there is none."""
    if isinstance(inputs, torch.Tensor) or hasattr(inputs, "__array__"):
        return len(inputs) if inputs.ndim else 1
    parts = inputs.values() if isinstance(inputs, Mapping) else inputs
    nested = isinstance(inputs, (Mapping, list, tuple))
    tensors = [each for each in parts if isinstance(each, torch.Tensor)] if nested else []
    return batch_size_of(tensors[0]) if tensors else 1


def to_device(value: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Move all tensors in nested dicts, lists and tuples (and whatever has .to) to `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=non_blocking)
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, dict):
        return type(value)({name: to_device(each, device, non_blocking) for name, each in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(each, device, non_blocking) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(each, device, non_blocking) for each in value)
    return value


def default_collate(samples: list[Any]) -> Any:
    """Stack samples to a batch: dicts by name, tuples by place.

    "label" and "label_ids" become "labels", lists of numbers become tensors, and text is
    left out, as Hugging Face's default collator does.
    """
    if not isinstance(samples[0], Mapping):
        return torch.utils.data.default_collate(samples)
    renamed = {"label": "labels", "label_ids": "labels"}
    return {
        renamed.get(name, name): _stack([sample[name] for sample in samples])
        for name, value in samples[0].items()
        if value is not None and not isinstance(value, str)
    }


def _stack(values: list[Any]) -> Any:
    """Tensors, arrays, numbers or lists of numbers as one tensor."""
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values)
    if hasattr(values[0], "__array__"):
        return torch.stack([torch.as_tensor(value, device="cpu") for value in values])
    return torch.tensor(values, device="cpu")
