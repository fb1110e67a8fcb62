"""Options that only set variables for the script: what Accelerate in it reads, and OMP_NUM_THREADS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What Accelerate's launcher writes for FSDP when nothing is said.
_FSDP_DEFAULTS = {
    "fsdp_version": "1",
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_reshard_after_forward": "true",
    "fsdp_offload_params": "false",
    "fsdp_min_num_params": 100_000_000,
    "fsdp_forward_prefetch": "false",
    "fsdp_use_orig_params": "true",
    "fsdp_cpu_ram_efficient_loading": "true",
    "fsdp_sync_module_states": "true",
    "fsdp_activation_checkpointing": "false",
    "fsdp_activation_checkpointing_offload": "false",
}
_RENAMED = {"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}


def script_variables(chosen: Mapping[str, Any]) -> dict[str, str]:
    """The variables that the chosen options set, and no others.

    Args:
        chosen: values by the options' keys.
    """
    variables: dict[str, str] = {}
    if "mixed_precision" in chosen:
        variables["ACCELERATE_MIXED_PRECISION"] = chosen["mixed_precision"]
    if "dynamo_backend" in chosen:
        variables["ACCELERATE_DYNAMO_BACKEND"] = chosen["dynamo_backend"].upper()
    if "dynamo_mode" in chosen:
        variables["ACCELERATE_DYNAMO_MODE"] = chosen["dynamo_mode"]
    for switch in ("use_fullgraph", "use_dynamic", "use_regional_compilation"):
        if chosen.get(f"dynamo_{switch}"):
            variables[f"ACCELERATE_DYNAMO_{switch.upper()}"] = "True"
    if chosen.get("debug"):
        variables["ACCELERATE_DEBUG_MODE"] = "true"
    if chosen.get("enable_cpu_affinity"):
        variables["ACCELERATE_CPU_AFFINITY"] = "1"
    if "num_cpu_threads_per_process" in chosen:
        variables["OMP_NUM_THREADS"] = str(chosen["num_cpu_threads_per_process"])
    return variables | (_fsdp_variables(chosen) if chosen.get("use_fsdp") else {})


def _fsdp_variables(chosen: Mapping[str, Any]) -> dict[str, str]:
    values = {**_FSDP_DEFAULTS, **{key: chosen[key] for key in chosen if key.startswith("fsdp_")}}
    named = {_RENAMED.get(key, key.upper()): str(value) for key, value in values.items()}
    return {"ACCELERATE_USE_FSDP": "true", **named}
