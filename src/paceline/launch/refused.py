"""Options of torchrun and Accelerate's launcher that are refused, and what to write instead."""

from __future__ import annotations

_DEEPSPEED = "DeepSpeed is not supported; for models that do not fit one device write --use_fsdp"
_MEGATRON = "Megatron-LM is not supported; for models that do not fit one device write --use_fsdp"
_TPU = "TPUs are not supported"
_SAGEMAKER = "SageMaker is not supported; start `paceline launch` inside the training job"
_FP8 = "fp8 is not supported; write --mixed_precision bf16"
_MPI = "mpirun is not used: name the hosts with --num_machines, --machine_rank and --main_process_ip"
_PARALLELISM = "tensor, context and sequence parallelism are not supported; every rank trains the whole model"
_FILTERS = "write --log_dir FOLDER, and filter the files"

_REASONS = {
    "use_deepspeed": _DEEPSPEED,
    "zero_stage": _DEEPSPEED,
    "zero3_init_flag": _DEEPSPEED,
    "zero3_save_16bit_model": _DEEPSPEED,
    "offload_optimizer_device": _DEEPSPEED,
    "offload_param_device": _DEEPSPEED,
    "offload_optimizer_nvme_path": _DEEPSPEED,
    "offload_param_nvme_path": _DEEPSPEED,
    "gradient_accumulation_steps": f"{_DEEPSPEED}; the script itself sets how often it accumulates",
    "gradient_clipping": f"{_DEEPSPEED}; the script itself sets how it clips",
    "use_megatron_lm": _MEGATRON,
    "tpu": _TPU,
    "tpu_cluster": _TPU,
    "no_tpu_cluster": _TPU,
    "tpu_use_sudo": _TPU,
    "vm": _TPU,
    "env": f"{_TPU}; set variables before the command, as in NAME=value paceline launch ...",
    "main_training_function": f"{_TPU}; other scripts are run from their first line",
    "downcast_bf16": _TPU,
    "use_parallelism_config": _PARALLELISM,
    "run_path": "a script is run as __main__ in a ready interpreter anyway; leave it out",
    "event_log_handler": "there are no torch elastic events; the launcher prints what happens",
    "duplicate_stdout_filters": _FILTERS,
    "duplicate_stderr_filters": _FILTERS,
    "logs_specs": "write --log_dir, --tee and --redirects",
    "numa_binding": "write --enable_cpu_affinity, or start the launcher under numactl",
    "virtual_local_rank": "every rank has its own LOCAL_RANK and sees all devices; leave it out",
}
_FAMILIES = {
    "deepspeed_": _DEEPSPEED,
    "megatron_lm_": _MEGATRON,
    "tpu_": _TPU,
    "mpirun_": _MPI,
    "fp8_": _FP8,
    "aws_": _SAGEMAKER,
    "parallelism_config_": _PARALLELISM,
}


def reason_against(option: str) -> str | None:
    """Why a known option is refused, and what to write instead; None when nobody has such an option.

    Args:
        option: as written, with its dashes and without a value.
    """
    name = option.lstrip("-").replace("-", "_")
    if name in _REASONS:
        return _REASONS[name]
    return next((reason for family, reason in _FAMILIES.items() if name.startswith(family)), None)
