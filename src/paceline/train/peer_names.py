"""Hugging Face's further spellings: attributes and methods that its subclasses and libraries read or call.

A mixin of Trainer; nothing in paceline itself depends on it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from paceline.errors import ArgumentError

if TYPE_CHECKING:
    from paceline.train.accelerator import Accelerator
    from paceline.train.arguments import TrainingArguments
    from paceline.train.state import TrainerState


class PeerNames:
    """See the module's text.

    Attributes:
        deepspeed, is_deepspeed_enabled, is_fsdp_enabled, is_fsdp_xla_enabled, is_model_parallel: what is
            not served, said so.
        place_model_on_device: the model is moved to the device.
        hp_search_backend, hp_name: None, as there is no hyper-parameter search.
    """

    args: TrainingArguments
    model: nn.Module
    model_wrapped: nn.Module
    accelerator: Accelerator
    state: TrainerState
    optimizer: Any

    deepspeed = None
    is_deepspeed_enabled = False
    is_fsdp_enabled = False
    is_fsdp_xla_enabled = False
    is_fsdp_xla_v2_enabled = False
    is_model_parallel = False
    place_model_on_device = True
    hp_search_backend = None
    hp_name = None
    current_flos = 0

    @property
    def _train_batch_size(self) -> int:
        """Samples of one micro-batch on this rank."""
        return self.args.train_batch_size

    @property
    def gather_function(self) -> Any:
        """What joins tensors of all ranks."""
        return self.accelerator.gather_for_metrics

    def get_tp_size(self) -> int:
        """Ranks of tensor parallelism: 1."""
        return 1

    def get_cp_size(self) -> int:
        """Ranks of context parallelism: 1."""
        return 1

    def get_sp_size(self) -> int:
        """Ranks of sequence parallelism: 1."""
        return 1

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> AbstractContextManager[Any]:
        """What the forward runs in: autocast, with bf16 or fp16."""
        return self.accelerator.autocast()

    def _get_learning_rate(self) -> float:
        """Of the first parameter group, for the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clip the model's gradients to max_grad_norm; returns their norm before."""
        return self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        """Move a model."""
        model.to(device)

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        """Tensors of all ranks, joined along the first dimension."""
        return None if tensors is None else self.accelerator.gather(tensors)

    def floating_point_ops(self, inputs: Any) -> int:
        """Operations of forward and backward for these inputs, if the model can say; else 0."""
        count = getattr(self.model, "floating_point_ops", None)
        return int(count(inputs)) if count is not None else 0

    def store_flos(self) -> None:
        """Nothing to do: operations are not counted, so total_flos stays what it is."""

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused.

        Raises:
            ArgumentError: always; it says what to use.
        """
        raise ArgumentError(
            "hyperparameter_search is not supported: there is no search in paceline; call a search library "
            "from the script and make a Trainer for each trial"
        )

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Refused.

        Raises:
            ArgumentError: always; it says what to use.
        """
        raise ArgumentError("push_to_hub is not supported: upload the saved folder with huggingface_hub")
