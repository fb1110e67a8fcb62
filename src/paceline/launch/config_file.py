"""Accelerate's configuration file, YAML or JSON, read as options of ``paceline launch``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ArgumentError
from paceline.launch.options import boolean, options
from paceline.launch.refused import reason_against

_AS_OPTION = {
    "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids",
    "rdzv_backend", "mixed_precision", "same_network", "enable_cpu_affinity", "debug",
}  # fmt: skip
_ON_DEVICES = {"NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA",
               "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON"}  # fmt: skip
# Keys of what is not supported, and the values that Accelerate writes there when it is not used.
_UNUSED: dict[str, tuple[Any, ...]] = {
    "deepspeed_config": ({},),
    "megatron_lm_config": ({},),
    "mpirun_config": ({},),
    "fp8_config": ({},),
    "parallelism_config": ({},),
    "downcast_bf16": (False, "no", "false"),
    "main_training_function": ("main",),
    "tpu_name": (),
    "tpu_zone": (),
    "tpu_use_cluster": (False,),
    "tpu_use_sudo": (False,),
    "tpu_vm": ([],),
    "tpu_env": ([],),
    "command_file": (),
    "commands": ([],),
}
_WITHIN = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_"}
_OLD_NAMES = {"fsdp_backward_prefetch_policy": "fsdp_backward_prefetch"}


def default_config_file(environment: Mapping[str, str]) -> Path:
    """Where Accelerate keeps its configuration, and ``paceline config`` writes it."""
    cache = Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(environment.get("HF_HOME") or cache).expanduser() / "accelerate" / "default_config.yaml"


def find_config_file(environment: Mapping[str, str]) -> Path | None:
    """The configuration file that is used when none is named, if there is one."""
    default = default_config_file(environment)
    return next((path for path in (default, default.with_suffix(".json")) if path.is_file()), None)


def read_config_file(name: str | None, environment: Mapping[str, str]) -> dict[str, Any]:
    """Values by the options' keys, from the named file or else from the default one; empty without one.

    Args:
        name: of the file; ``.json`` is read as JSON, anything else as YAML.
        environment: variables of this process.

    Raises:
        ArgumentError: the file is not there, cannot be understood, has an unknown key, or asks for what
            is not supported.
    """
    path = Path(name) if name is not None else find_config_file(environment)
    if path is None:
        return {}
    try:
        content = _parse(path)
        return _as_options(content)
    except ArgumentError as error:
        raise ArgumentError(f"configuration file {str(path)!r}: {error}") from None


def _parse(path: Path) -> dict[str, Any]:
    import yaml  # here: most launches have no such file, and it takes as long as all the rest

    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise ArgumentError(f"{error.strerror}; `paceline config` writes one") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ArgumentError(f"cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ArgumentError("is no list of `key: value`")
    return content


def _as_options(content: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in content.items():
        if key in _AS_OPTION:
            found.update(_option(key, value))
        elif key in _WITHIN and (value is None or isinstance(value, dict)):
            for name, inner in (value or {}).items():
                prefix = "" if str(name).startswith(_WITHIN[key]) else _WITHIN[key]
                found.update(_option(f"{prefix}{name}", inner))
        elif key in _UNUSED:
            if value is not None and value not in _UNUSED[key]:
                raise ArgumentError(f"{key}: {reason_against(key) or 'TPUs are not supported'}")
        else:
            found.update(_special(key, value))
    return found


def _option(key: str, value: Any) -> dict[str, Any]:
    key = _OLD_NAMES.get(key, key)
    option = next((option for option in options() if option.key == key), None)
    if option is None:
        raise ArgumentError(f"{key}: {reason_against(key) or 'there is no such option'}")
    if value is None or (key == "num_processes" and value == -1):
        return {}
    if option.read is None:
        return {key: True} if _true(key, value) else {}
    try:
        return {key: option.read(_text(value))}
    except argparse.ArgumentTypeError as error:
        raise ArgumentError(f"{key}: {error}") from None


def _text(value: Any) -> str:
    """As it would stand on the command line."""
    if isinstance(value, bool):  # which a bare yes or no is in YAML
        return "true" if value else "no"
    if isinstance(value, float) and value.is_integer():  # 1e8 is a number of parameters, too
        return str(int(value))
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _special(key: str, value: Any) -> dict[str, Any]:
    """Keys that are not options of the same name."""
    if key == "compute_environment":
        if value not in ("LOCAL_MACHINE", None):
            raise ArgumentError(f"compute_environment: {reason_against('aws_')}")
        return {}
    if key == "distributed_type":
        return _distributed_type(value)
    if key == "use_cpu":
        return {"cpu": True} if _true(key, value) else {}
    if key == "fp16":  # of old files
        return {"mixed_precision": "fp16"} if _true(key, value) else {}
    if key == "dynamo_backend":  # of old files
        return _option(key, value)
    raise ArgumentError(f"there is no key {key!r}; take it out")


def _distributed_type(value: Any) -> dict[str, Any]:
    name = "NO" if value in (False, None) else str(value)  # YAML reads a bare NO as false
    if name in _ON_DEVICES:
        return {}
    if name == "FSDP":
        return {"use_fsdp": True}
    option = {"DEEPSPEED": "use_deepspeed", "MEGATRON_LM": "use_megatron_lm", "XLA": "tpu", "TPU": "tpu"}
    known = ", ".join(sorted(_ON_DEVICES))
    reason = reason_against(option.get(name, "")) or f"there is no such type; write FSDP or one of {known}"
    raise ArgumentError(f"distributed_type {name}: {reason}")


def _true(key: str, value: Any) -> bool:
    if value is None:
        return False
    try:
        return boolean(str(value)) == "true"
    except argparse.ArgumentTypeError as error:
        raise ArgumentError(f"{key}: {error}") from None
