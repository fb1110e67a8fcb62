"""Fields that transformers 4.57 had and 5.18 has no more: what they are called now, or what became of them.

Scripts that pass an old name run as they did, with a warning that says what to write. An old
field that asks for something paceline does not do raises, unless it has its old default.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from paceline.errors import ArgumentError

_HUB = "the Hub is not served; upload the finished folder with huggingface_hub"
_DEVICE = "the device is found by itself; leave it out"
_AUTOCAST = "fp16 and bf16 mean torch.autocast"

# Old name -> new name, the old default (at which it says nothing), and the new field's value where
# that is not the old one's.
RENAMED: Mapping[str, tuple[str, Any, Any]] = {
    "evaluation_strategy": ("eval_strategy", None, None),
    "warmup_ratio": ("warmup_steps", 0.0, None),
    "no_cuda": ("use_cpu", False, None),
    "per_gpu_train_batch_size": ("per_device_train_batch_size", None, None),
    "per_gpu_eval_batch_size": ("per_device_eval_batch_size", None, None),
    "adafactor": ("optim", False, "adafactor"),
    "group_by_length": ("train_sampling_strategy", False, "group_by_length"),
    "include_inputs_for_metrics": ("include_for_metrics", False, ["inputs"]),
    "include_tokens_per_second": ("include_num_input_tokens_seen", False, "all"),
    "torchdynamo": ("torch_compile_backend", None, None),
}

# Old name -> the values that ask for nothing that is not done in any case (the old default first), and what
# to write instead, or why there is nothing to write.
DROPPED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "overwrite_output_dir": ((False, True), "a folder that is there is used as it is"),
    "logging_dir": ((None,), "set the environment variable TENSORBOARD_LOGGING_DIR"),
    "save_safetensors": ((True,), "weights are always saved as safetensors"),
    "use_mps_device": ((False, True), _DEVICE),
    "jit_mode_eval": ((False,), "use torch_compile=True"),
    "fp16_opt_level": (("O1",), _AUTOCAST),
    "half_precision_backend": (("auto", "cuda_amp", "cpu_amp"), _AUTOCAST),
    "fp16_backend": (("auto", "cuda_amp", "cpu_amp"), _AUTOCAST),
    "tpu_num_cores": ((None,), _DEVICE),
    "tpu_metrics_debug": ((False,), "there is no support for TPUs"),
    "past_index": ((-1,), "give the model its past in the batch"),
    "fsdp_min_num_params": ((0,), "sharded models are not served yet"),
    "fsdp_transformer_layer_cls_to_wrap": ((None,), "sharded models are not served yet"),
    "use_legacy_prediction_loop": ((False,), "there is one evaluation loop"),
    "push_to_hub_model_id": ((None,), _HUB),
    "push_to_hub_organization": ((None,), _HUB),
    "push_to_hub_token": ((None,), _HUB),
    "mp_parameters": (("",), "there is no support for SageMaker's model parallelism"),
    "ray_scope": (("last",), "there is no hyper-parameter search"),
}


class TakesOldNames(type):
    """Metaclass of TrainingArguments: translates old names before any (generated) ``__init__`` sees them."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance; see the module's text."""
        return super().__call__(*args, **translated(kwargs, _signature_of_init(cls).parameters))

    @property
    def __signature__(cls) -> inspect.Signature:
        """That of ``__init__``, for those who ask the class."""
        signature = _signature_of_init(cls)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


def _signature_of_init(cls: Any) -> inspect.Signature:
    return inspect.signature(cls.__init__)


def translated(values: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """`values` under today's names.

    Args:
        values: keyword arguments, by old or new names.
        known: names that are taken as they are, though they may be among the old ones (a subclass's field).

    Raises:
        ArgumentError: an old field asks for what is not done, or contradicts the new one.
    """
    old = {name for name in values if name in RENAMED or name in DROPPED} - set(known)
    result = {name: value for name, value in values.items() if name not in old}
    for name in old & set(DROPPED):
        _leave_out(name, values[name])
    for name in old & set(RENAMED):
        if values[name] != RENAMED[name][1]:
            _rename(result, name, values[name])
    return result


def _rename(result: dict[str, Any], name: str, value: Any) -> None:
    new, _, fixed = RENAMED[name]
    new_value = value if fixed is None else fixed
    warnings.warn(f"{name} is now {new}; write {new}={new_value!r}", FutureWarning, stacklevel=4)
    if new == "warmup_steps" and result.get(new):
        return  # warm-up steps took precedence over the ratio
    if result.get(new, new_value) != new_value:
        raise ArgumentError(f"{name}={value!r} and {new}={result[new]!r} contradict; leave {name} out")
    result[new] = new_value


def _leave_out(name: str, value: Any) -> None:
    allowed, instead = DROPPED[name]
    if value not in allowed:
        raise ArgumentError(f"{name}={value!r} is not supported by paceline: {instead}")
    text = f"{name} is no longer a field and can be left out: {instead}"
    warnings.warn(text, FutureWarning, stacklevel=4)
