"""Fields that transformers 4.57 had and 5.18 has no more: what they are called now, or what became of them.

Scripts that pass an old name run as they did, with a warning that says what to write. An old
field that asks for something paceline does not do raises, unless it has its old default.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import ArgumentError


@dataclass(frozen=True)
class Renamed:
    """An old field with a successor.

    Attributes:
        new: the successor's name.
        default: the old default, at which the old field says nothing.
        convert: its value as the successor's.
    """

    new: str
    default: Any
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Dropped:
    """An old field without a successor.

    Attributes:
        default: the old default, at which it asks for nothing.
        harmless: other values that ask for nothing that is not done in any case.
        instead: what to write instead, or why there is nothing to write.
    """

    default: Any
    instead: str
    harmless: tuple[Any, ...] = ()


_HUB = "the Hub is not served; upload the finished folder with huggingface_hub"
_DEVICE = "the device is found by itself; leave it out"

OLD_FIELDS: Mapping[str, Renamed | Dropped] = {
    "evaluation_strategy": Renamed("eval_strategy", None),
    "warmup_ratio": Renamed("warmup_steps", 0.0),
    "no_cuda": Renamed("use_cpu", False),
    "per_gpu_train_batch_size": Renamed("per_device_train_batch_size", None),
    "per_gpu_eval_batch_size": Renamed("per_device_eval_batch_size", None),
    "adafactor": Renamed("optim", False, lambda value: "adafactor"),
    "group_by_length": Renamed("train_sampling_strategy", False, lambda value: "group_by_length"),
    "include_inputs_for_metrics": Renamed("include_for_metrics", False, lambda value: ["inputs"]),
    "include_tokens_per_second": Renamed("include_num_input_tokens_seen", False, lambda value: "all"),
    "torchdynamo": Renamed("torch_compile_backend", None),
    "overwrite_output_dir": Dropped(
        False, "checkpoints are never overwritten unless a run is resumed or repeated", (True,)
    ),
    "logging_dir": Dropped(None, "set the environment variable TENSORBOARD_LOGGING_DIR"),
    "save_safetensors": Dropped(True, "weights are always saved as safetensors"),
    "use_mps_device": Dropped(False, _DEVICE, (True,)),
    "jit_mode_eval": Dropped(False, "use torch_compile=True"),
    "fp16_opt_level": Dropped("O1", "fp16 means torch.autocast with loss scaling"),
    "half_precision_backend": Dropped("auto", "fp16 and bf16 mean torch.autocast", ("cuda_amp", "cpu_amp")),
    "fp16_backend": Dropped("auto", "fp16 and bf16 mean torch.autocast", ("cuda_amp", "cpu_amp")),
    "tpu_num_cores": Dropped(None, _DEVICE),
    "tpu_metrics_debug": Dropped(False, "there is no support for TPUs"),
    "past_index": Dropped(-1, "give the model its past in the batch"),
    "fsdp_min_num_params": Dropped(0, "sharded models are not served yet"),
    "fsdp_transformer_layer_cls_to_wrap": Dropped(None, "sharded models are not served yet"),
    "use_legacy_prediction_loop": Dropped(False, "there is one evaluation loop"),
    "push_to_hub_model_id": Dropped(None, _HUB),
    "push_to_hub_organization": Dropped(None, _HUB),
    "push_to_hub_token": Dropped(None, _HUB),
    "mp_parameters": Dropped("", "there is no support for SageMaker's model parallelism"),
    "ray_scope": Dropped("last", "there is no hyper-parameter search"),
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
    result = {name: value for name, value in values.items() if name in known or name not in OLD_FIELDS}
    for name in [name for name in values if name not in result]:
        old, value = OLD_FIELDS[name], values[name]
        if isinstance(old, Dropped):
            _warn_or_raise(name, old, value)
        elif value != old.default:
            _take(result, name, old, value)
    return result


def _take(result: dict[str, Any], name: str, old: Renamed, value: Any) -> None:
    new_value = old.convert(value)
    warnings.warn(f"{name} is now {old.new}; write {old.new}={new_value!r}", FutureWarning, stacklevel=4)
    if old.new == "warmup_steps" and result.get("warmup_steps"):
        return  # warm-up steps took precedence over the ratio
    if result.get(old.new, new_value) != new_value:
        raise ArgumentError(
            f"{name}={value!r} and {old.new}={result[old.new]!r} contradict; leave {name} out"
        )
    result[old.new] = new_value


def _warn_or_raise(name: str, old: Dropped, value: Any) -> None:
    if value != old.default and value not in old.harmless:
        raise ArgumentError(f"{name}={value!r} is not supported by paceline: {old.instead}")
    warnings.warn(
        f"{name} is no longer a field and can be left out: {old.instead}", FutureWarning, stacklevel=4
    )
