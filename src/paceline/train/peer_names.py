"""Hugging Face's further spellings: attributes and methods that its subclasses and libraries read or call.

A mixin of Trainer; nothing in paceline itself depends on it. A part of their loop that does not exist here
cannot be overridden: a subclass that tries is refused by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.checkpoint.atomic import write_text
from paceline.errors import ArgumentError

if TYPE_CHECKING:
    from paceline.train.accelerator import Accelerator
    from paceline.train.arguments import TrainingArguments
    from paceline.train.collectives import Collectives
    from paceline.train.state import TrainerState


# Parts of their loop -> what to override here instead.
NOT_CALLED = {
    "_inner_training_loop": "training_step, compute_loss, or a callback",
    "_run_epoch": "training_step, or on_epoch_begin and on_epoch_end of a callback",
    "_prepare_for_training": "create_optimizer, create_scheduler, _wrap_model",
    "_init_training_state": "on_train_begin of a callback",
    "_finalize_training": "on_train_end of a callback",
    "_maybe_log_save_evaluate": "log, evaluate, _save_checkpoint, or a callback",
    "set_initial_training_values": "max_steps and num_train_epochs",
    "create_accelerator_and_postprocess": "nothing: Accelerate is not used",
    "_build_accelerator_args": "nothing: Accelerate is not used",
    "_save_optimizer_and_scheduler": "_save_checkpoint",
    "_load_optimizer_and_scheduler": "state_dict and load_state_dict of the optimizer",
    "_save_rng_state": "nothing: random numbers are a function of seed and step",
    "_load_rng_state": "nothing: random numbers are a function of seed and step",
    "_save_scaler": "_save_checkpoint",
    "_load_scaler": "state_dict and load_state_dict of the scaler",
    "_get_grad_norm": "on_pre_optimizer_step of a callback",
}


class PeerNames:
    """See the module's text.

    Attributes:
        deepspeed, is_deepspeed_enabled, is_fsdp_enabled, is_fsdp_xla_enabled, is_model_parallel: what is
            not served, said so.
        place_model_on_device: the model is moved to the device.
        hp_search_backend, hp_name: None, as there is no hyper-parameter search.
        current_flos: this rank's floating-point operations since `store_flos` was called last.
    """

    args: TrainingArguments
    model: nn.Module
    model_wrapped: nn.Module
    accelerator: Accelerator
    state: TrainerState
    optimizer: Any
    model_init: Any
    collectives: Collectives

    hub_model_id = None
    deepspeed = None
    is_deepspeed_enabled = False
    is_fsdp_enabled = False
    is_fsdp_xla_enabled = False
    is_fsdp_xla_v2_enabled = False
    is_model_parallel = False
    place_model_on_device = True
    hp_search_backend = None
    hp_name = None
    current_flos = 0.0
    _weights_counted_of: nn.Module | None = None
    _weights_counted = 0

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        for name, instead in NOT_CALLED.items():
            if name in vars(cls) and not cls.__module__.startswith("paceline."):
                raise ArgumentError(
                    f"{cls.__qualname__} overrides {name}, which paceline's loop does not go through; "
                    f"override instead: {instead}"
                )

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
        return float(self._made_optimizer().param_groups[0]["lr"])

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clip the model's gradients to max_grad_norm; returns their norm before."""
        return self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def get_num_trainable_parameters(self) -> int:
        """Elements of the parameters that are trained."""
        return sum(each.numel() for each in self.model.parameters() if each.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """Of each parameter group, for the next step."""
        return [group["lr"] for group in self._made_optimizer().param_groups]

    def get_optimizer_group(self, param: nn.Parameter | None = None) -> Any:
        """The parameter group of `param`; without it, the parameters of every group."""
        groups = self._made_optimizer().param_groups
        if param is None:
            return [group["params"] for group in groups]
        return next((group for group in groups if any(each is param for each in group["params"])), None)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A fresh model from `model_init`, which takes nothing or a trial."""
        takes = len(inspect.signature(self.model_init).parameters)
        if takes > 1:
            raise ArgumentError(f"model_init takes {takes} arguments; it must take none, or one (the trial)")
        model: Any = self.model_init(trial) if takes else self.model_init()
        if model is None:
            raise ArgumentError("model_init returned None, but it must return the model")
        made: nn.Module = model
        return made

    def _get_output_dir(self, trial: Any = None) -> str:
        """Where this run writes."""
        return str(self.args.output_dir)

    def create_model_card(self, **facts: Any) -> None:
        """Write README.md with the run's facts to output_dir, on rank 0.

        Args:
            facts: language, license, tags, model_name, finetuned_from, tasks, dataset_tags, dataset,
                dataset_args.

        Raises:
            ArgumentError: transformers is not installed.
        """
        if self.args.process_index != 0:
            return
        if importlib.util.find_spec("transformers") is None:
            raise ArgumentError("create_model_card needs transformers; run `pip install transformers`")
        summary = importlib.import_module("transformers.modelcard").TrainingSummary
        folder = Path(str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "README.md", summary.from_trainer(self, **facts).to_model_card())

    def end(self) -> None:
        """Take the process group down, at the very end of a script."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _made_optimizer(self) -> Any:
        if self.optimizer is None:
            raise ArgumentError("there is no optimizer yet; call create_optimizer() or train() first")
        return self.optimizer

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        """Move a model."""
        model.to(device)

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        """Tensors of all ranks, joined along the first dimension."""
        return None if tensors is None else self.accelerator.gather(tensors)

    def floating_point_ops(self, inputs: Any) -> int:
        """Operations of forward and backward for these inputs: six for each token and weight.

        0 unless the model has ``num_parameters``, as those of transformers have; embeddings do not count.
        """
        count: Any = getattr(self.model, "num_parameters", None)
        tokens = inputs.get(self._main_input_name) if isinstance(inputs, Mapping) else None
        if count is None or not isinstance(tokens, Tensor):
            return 0
        if self._weights_counted_of is not self.model:  # counting takes longer than a small step
            self._weights_counted_of, self._weights_counted = self.model, int(count(exclude_embeddings=True))
        return 6 * tokens.numel() * self._weights_counted

    def store_flos(self) -> None:
        """Add the operations of all ranks since the last call to the state's total_flos."""
        dtype = torch.float32 if self.args.device.type == "mps" else torch.float64
        own = torch.tensor(self.current_flos, dtype=dtype, device=self.args.device)
        self.state.total_flos += float(self.collectives.sum(own, "adding up floating-point operations"))
        self.current_flos = 0.0

    @property
    def _main_input_name(self) -> str:
        return str(getattr(self.model, "main_input_name", "input_ids"))

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
