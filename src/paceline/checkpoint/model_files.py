"""A model's weights as files: written for whoever reads Hugging Face's layout, and read back.

model has save_pretrained        what that writes (config.json, model.safetensors, shards ...)
any other module                 model.safetensors
safetensors is not installed,    pytorch_model.bin
or cannot hold a tensor
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from paceline.errors import CheckpointError

SAFE_NAME = "model.safetensors"
TORCH_NAME = "pytorch_model.bin"
ADAPTER_CONFIG = "adapter_config.json"  # written by PEFT, whose save_pretrained leaves the base model out


def save_model(model: nn.Module, folder: Path, state: dict[str, Any] | None = None) -> None:
    """Write the weights (and a pretrained model's configuration) into `folder`.

    Args:
        model: whose weights, and whose way of saving.
        folder: which exists.
        state: a state dict to write instead of the model's own; see `takes_state`.
    """
    save_pretrained: Any = getattr(model, "save_pretrained", None)
    if save_pretrained is not None:
        save_pretrained(folder, **({} if state is None else {"state_dict": state}))
        return
    entries = model.state_dict() if state is None else state
    if _safetensors_can_hold(entries):
        holder = SimpleNamespace(state_dict=lambda: dict(entries))  # all that the library asks of a model
        importlib.import_module("safetensors.torch").save_model(holder, str(folder / SAFE_NAME))
    else:
        torch.save(entries, folder / TORCH_NAME)


def takes_state(model: nn.Module) -> bool:
    """Whether `save_model` can write a copy of the model's state instead of the state itself."""
    save_pretrained: Any = getattr(model, "save_pretrained", None)
    return save_pretrained is None or "state_dict" in inspect.signature(save_pretrained).parameters


def load_model(model: nn.Module, folder: Path) -> None:
    """Read weights that `save_model` or a pretrained model wrote into `model`, in place.

    Raises:
        CheckpointError: there are none, or they do not fit; the text names the entries.
    """
    if (folder / ADAPTER_CONFIG).is_file() and hasattr(model, "load_adapter"):
        _load_adapter(model, folder)
        return
    missing, unexpected = set(model.state_dict()), []
    for path in _weight_files(folder):
        entries = _read(path)
        try:
            result = model.load_state_dict(entries, strict=False)
        except RuntimeError as error:
            raise CheckpointError(f"{path} does not fit the model: {error}") from error
        missing -= set(entries)
        unexpected += result.unexpected_keys
    missing -= _tied_to_present(model, missing)
    if missing or unexpected:
        raise CheckpointError(
            f"{folder} does not fit the model: missing {sorted(missing)}, unexpected {sorted(unexpected)}; "
            f"build the model as it was built for the run that wrote the checkpoint"
        )


def _load_adapter(model: nn.Module, folder: Path) -> None:
    """Read the weights of a PEFT model's active adapter; the base model is as it was."""
    adapted: Any = model
    try:
        adapted.load_adapter(str(folder), adapted.active_adapters[0], is_trainable=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder} does not fit the model's adapter: {error}") from error


def _safetensors_can_hold(state: dict[str, Any]) -> bool:
    """Whether safetensors is here, and the state is nothing but plain tensors."""
    if importlib.util.find_spec("safetensors") is None:
        return False
    return all(
        isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_complex()
        for value in state.values()
    )


def _weight_files(folder: Path) -> Iterator[Path]:
    for name in (SAFE_NAME, TORCH_NAME):
        if (folder / name).is_file():
            yield folder / name
            return
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = json.loads(index.read_text())["weight_map"].values()
            yield from (folder / shard for shard in sorted(set(shards)))
            return
    raise CheckpointError(f"{folder} holds neither {SAFE_NAME} nor {TORCH_NAME}")


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".safetensors":
            entries: dict[str, Any] = importlib.import_module("safetensors.torch").load_file(str(path))
        else:
            entries = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return entries


def _tied_to_present(model: nn.Module, missing: set[str]) -> set[str]:
    """Of the missing names, those that are another name for a tensor that was loaded."""
    state = model.state_dict(keep_vars=True)
    present = {
        id(value) for name, value in state.items() if name not in missing and isinstance(value, torch.Tensor)
    }
    return {name for name in missing if id(state[name]) in present}
