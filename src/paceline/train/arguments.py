"""TrainingArguments: every setting of a run, its meaning under its name, checked when it is made.

Names, defaults and meanings are those of transformers 5.18. The help text below is
the command line's help (``transformers.HfArgumentParser`` parses this class) and the
documentation. `rules.py` says what cannot work, and which fields are not served yet.
"""

# ruff: noqa: RUF009, RUF036  (option() makes a dataclass field; HfArgumentParser needs None first)

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.select import choose_device, initialize_process_group
from paceline.environment import rank_place, requested_precision
from paceline.train import rules
from paceline.train.old_names import TakesOldNames
from paceline.train.setters import GroupSetters
from paceline.train.turns import Turns
from paceline.train.whereabouts import DistributedState, ParallelMode


def option(default: Any, help: str, **more: Any) -> Any:
    """A dataclass field with its help text."""
    return field(default=default, metadata={"help": help, **more})


@dataclass(repr=False)
class TrainingArguments(GroupSetters, metaclass=TakesOldNames):
    """The settings of a training run.

    Constructing it brings up the process group (also for a single rank), so that
    `world_size`, `process_index` and `device` are known from then on. A group that is
    up already is used as it is. Names of fields that transformers 4.57 had are taken with a
    warning (old_names.py).

    Raises:
        ArgumentError: (a ValueError) a value cannot work, contradicts another one, or
            belongs to a field that is not served yet; the text names it.
        BackendUnavailableError: `ddp_backend` is not to be had here.
    """

    # Fields that may be given as JSON text; subclasses add their own.
    _VALID_DICT_FIELDS = [  # noqa: RUF012  (not a field: it has no annotation)
        "accelerator_config",
        "fsdp_config",
        "deepspeed",
        "gradient_checkpointing_kwargs",
        "lr_scheduler_kwargs",
    ]

    # What to train, and for how long
    output_dir: str | None = option(None, "Folder for checkpoints and logs (default: trainer_output).")
    per_device_train_batch_size: int = option(8, "Samples of one forward on one rank.")
    num_train_epochs: float = option(3.0, "Passes over the training data; a fraction ends inside the last.")
    max_steps: int = option(-1, "Optimizer steps in all; if positive it overrides num_train_epochs.")

    # Learning rate and optimizer
    learning_rate: float = option(5e-5, "Peak learning rate, reached after the warm-up.")
    lr_scheduler_type: str = option(
        "linear", "How the learning rate changes over the steps.", choices=rules.SCHEDULES
    )
    lr_scheduler_kwargs: dict[str, Any] | str | None = option(
        None, 'Extra settings of the schedule, as a dict or JSON, such as {"num_cycles": 2}.'
    )
    warmup_steps: float = option(0, "Steps of linear warm-up; below 1 it is a share of all steps.")
    optim: str = option("adamw_torch_fused", "The optimizer.", choices=rules.OPTIMIZERS)
    optim_args: str | None = option(None, "More for the optimizer, as in 'momentum=0.9,nesterov=true'.")
    weight_decay: float = option(0.0, "Weight decay of all parameters but biases and norm weights.")
    adam_beta1: float = option(0.9, "AdamW: decay of the mean of gradients.")
    adam_beta2: float = option(0.999, "AdamW: decay of the mean of squared gradients.")
    adam_epsilon: float = option(1e-8, "AdamW: added to the denominator.")
    optim_target_modules: None | str | list[str] = option(None, "Modules that a low-rank optimizer serves.")
    gradient_accumulation_steps: int = option(1, "Micro-batches whose gradients make one optimizer step.")
    average_tokens_across_devices: bool = option(
        True, "Average the loss over the items of all ranks; if not, over each rank's, and then over ranks."
    )
    max_grad_norm: float = option(1.0, "Clip the gradient to this norm; 0 leaves it alone.")
    label_smoothing_factor: float = option(0.0, "Probability mass that labels give to the other classes.")

    # Precision, memory and speed
    bf16: bool = option(False, "Compute the forward in bfloat16 where torch.autocast holds it safe.")
    fp16: bool = option(False, "Compute the forward in float16 with loss scaling.")
    bf16_full_eval: bool = option(False, "Evaluate outside training with all weights in bfloat16.")
    fp16_full_eval: bool = option(False, "Evaluate outside training with all weights in float16.")
    tf32: bool | None = option(None, "Let matrix products of float32 use TF32.")
    gradient_checkpointing: bool = option(False, "Compute activations anew in backward, keep none.")
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = option(
        None, 'Given to the model\'s gradient_checkpointing_enable, such as {"use_reentrant": false}.'
    )
    torch_compile: bool = option(False, "Compile the model with torch.compile.")
    torch_compile_backend: str | None = option(
        None, "The backend of torch.compile (default: inductor); it implies torch_compile."
    )
    torch_compile_mode: str | None = option(None, "The mode of torch.compile; it implies torch_compile.")
    use_liger_kernel: bool = option(False, "Replace layers by Liger kernels.")
    liger_kernel_config: dict[str, Any] | None = option(None, "Which Liger kernels.")
    use_cache: bool = option(False, "Value of the model configuration's use_cache in training.")
    neftune_noise_alpha: float | None = option(None, "Noise added to embeddings (NEFTune).")
    torch_empty_cache_steps: int | None = option(None, "Empty the device's memory cache every so many steps.")
    auto_find_batch_size: bool = option(False, "Halve the batch size until it fits the memory.")

    # Logging
    logging_strategy: str = option("steps", "When to log.", choices=rules.INTERVALS)
    logging_steps: float = option(500, "Steps between two logs; below 1 a share of all steps.")
    logging_first_step: bool = option(False, "Log after the very first step as well.")
    log_on_each_node: bool = option(True, "One rank of each machine logs, not only rank 0.")
    logging_nan_inf_filter: bool = option(True, "Log the mean of the others for a NaN or infinite loss.")
    include_num_input_tokens_seen: str | bool = option(
        "no", "Count the input tokens: all, non_padding, or no."
    )
    log_level: str = option("passive", "Log level of ranks that log.", choices=rules.LOG_LEVELS)
    log_level_replica: str = option("warning", "Log level of the other ranks.", choices=rules.LOG_LEVELS)
    disable_tqdm: bool | None = option(None, "Print plain lines instead of a progress bar.")
    report_to: None | str | list[str] = option(
        "none", "Where logs are sent: tensorboard, wandb, mlflow, trackio, all (those installed), none."
    )
    run_name: str | None = option(None, "Name of the run in those services.")
    project: str = option("huggingface", "Trackio: the project.")
    trackio_space_id: str | None = option(None, "Trackio: the Space.")
    trackio_bucket_id: str | None = option(None, "Trackio: the bucket.")
    trackio_static_space_id: str | None = option(None, "Trackio: the static Space.")

    # Evaluation
    eval_strategy: str = option("no", "When to evaluate during training.", choices=rules.INTERVALS)
    eval_steps: float | None = option(
        None, "Steps between two evaluations (default: logging_steps); below 1 a share of all steps."
    )
    eval_delay: float = option(0, "Epochs or steps (as in eval_strategy) before the first evaluation.")
    per_device_eval_batch_size: int = option(8, "Samples of one evaluation forward on one rank.")
    prediction_loss_only: bool = option(False, "Evaluate the loss alone, and keep no predictions.")
    eval_on_start: bool = option(False, "Evaluate before the first step.")
    eval_do_concat_batches: bool = option(True, "Join the predictions of all batches into one array.")
    eval_use_gather_object: bool = option(
        False, "Gather predictions as Python objects; that is what is done in any case."
    )
    eval_accumulation_steps: int | None = option(
        None, "Evaluation batches after which predictions move to the CPU (default: at the end)."
    )
    include_for_metrics: list[str] = field(
        default_factory=list, metadata={"help": "More that compute_metrics gets: inputs, loss."}
    )
    batch_eval_metrics: bool = option(False, "Call compute_metrics(batch, compute_result) batch by batch.")

    # Checkpoints
    save_only_model: bool = option(False, "Leave optimizer and schedule out; it cannot be resumed.")
    save_strategy: str = option("steps", "When to save.", choices=rules.SAVE_INTERVALS)
    save_steps: float = option(500, "Steps between two checkpoints; below 1 a share of all steps.")
    save_on_each_node: bool = option(False, "One rank of each machine saves (no common file system).")
    save_total_limit: int | None = option(None, "Keep so many checkpoints, among them newest and best.")
    enable_jit_checkpoint: bool = option(False, "Save when SIGTERM comes.")
    push_to_hub: bool = option(False, "Upload to the Hugging Face Hub.")
    hub_token: str | None = option(None, "Hub: the token.")
    hub_private_repo: bool | None = option(None, "Hub: private repository.")
    hub_model_id: str | None = option(None, "Hub: name of the repository.")
    hub_strategy: str = option("every_save", "Hub: when to upload.")
    hub_always_push: bool = option(False, "Hub: upload though the last upload is still running.")
    hub_revision: str | None = option(None, "Hub: the revision.")
    load_best_model_at_end: bool = option(False, "Load the best checkpoint when training is done.")
    metric_for_best_model: str | None = option(None, "Metric that says which is best (default: loss).")
    greater_is_better: bool | None = option(None, "Whether higher is better (default: not for a loss).")
    ignore_data_skip: bool = option(False, "Resume at the beginning of the data.")
    restore_callback_states_from_checkpoint: bool = option(False, "Restore callbacks' own state.")

    # Reproducibility and device
    full_determinism: bool = option(False, "Use deterministic kernels only; an operation without one raises.")
    seed: int = option(42, "Seed of everything random in training.")
    data_seed: int | None = option(None, "Seed of the order of samples (default: seed).")
    use_cpu: bool = option(False, "Train on the CPU though there is an accelerator.")
    accelerator_config: dict[str, Any] | str | None = option(
        None, "Settings that Accelerate would get, as a dict or JSON file."
    )
    parallelism_config: Any = option(None, "Accelerate: tensor, context and sequence parallelism.")

    # Data
    dataloader_drop_last: bool = option(False, "Leave out an epoch's last, incomplete global batch.")
    dataloader_num_workers: int = option(0, "Processes that load data for a rank; 0: itself.")
    dataloader_pin_memory: bool = option(True, "Load into page-locked memory (accelerators only).")
    dataloader_persistent_workers: bool = option(False, "Keep the workers over epochs.")
    dataloader_prefetch_factor: int | None = option(None, "Batches each worker loads ahead.")
    dataloader_multiprocessing_context: str | None = option(None, "How workers start: fork, spawn ...")
    dataloader_in_order: bool = option(
        True, "Keep the order of batches with workers; if not, the first that is ready is next."
    )
    remove_unused_columns: bool = option(True, "Drop entries that the forward does not take.")
    label_names: list[str] | None = option(None, "Entries that are labels (default: found by name).")
    train_sampling_strategy: str = option(
        "random", "Order of training samples; group_by_length saves padding.", choices=rules.ORDERS
    )
    length_column_name: str = option("length", "Column with lengths, for group_by_length.")

    # Data parallelism
    ddp_find_unused_parameters: bool | None = option(
        None, "Allow steps that leave parameters without gradient (default: yes, it costs nothing here)."
    )
    ddp_bucket_cap_mb: int | None = option(None, "Size of a gradient bucket in MiB.")
    ddp_broadcast_buffers: bool | None = option(None, "Take rank 0's buffers at each step (default: yes).")
    ddp_static_graph: bool | None = option(None, "Every step uses the same parameters (default: no).")
    ddp_backend: str | None = option(
        None,
        "Backend that moves gradients: nccl, gloo, xccl, hccl, cncl, mpi (default: the device's usual one).",
    )
    ddp_timeout: int = option(1800, "Seconds a collective waits for the other ranks before it raises.")

    # Other ways to split a model
    fsdp: str | None = option(None, "Shard the model (FSDP).")
    fsdp_config: dict[str, Any] | str | None = option(None, "FSDP: its settings.")
    deepspeed: dict[str, Any] | str | None = option(None, "DeepSpeed: its settings.")

    # Debugging
    debug: str | list[str] = option(
        "", "underflow_overflow: stop at the first NaN or Inf of a forward, and name the module."
    )
    skip_memory_metrics: bool = option(True, "Report no memory use in the metrics (it needs psutil).")

    # For the calling script; the Trainer itself does not look at them
    do_train: bool = option(False, "For scripts: whether to train.")
    do_eval: bool = option(False, "For scripts: whether to evaluate; true if eval_strategy is not no.")
    do_predict: bool = option(False, "For scripts: whether to predict.")
    resume_from_checkpoint: str | None = option(None, "For scripts: the checkpoint to resume from.")
    local_rank: int = option(-1, "For old launchers that pass it; the place comes from the environment.")

    def __post_init__(self) -> None:
        rules.normalise(self)
        rules.check(self)
        self._device = choose_device(self.use_cpu)
        self._backend = initialize_process_group(
            self.ddp_backend, timeout=self.ddp_timeout_delta, device=self._device
        )
        rules.check_batch_split(self)
        if self.tf32 is not None:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.tf32

    def __repr__(self) -> str:
        values = self.to_dict()  # without secrets
        lines = [f"    {name}={value!r},\n" for name, value in values.items()]
        return f"{type(self).__name__}(\n{''.join(lines)})"

    # Where this rank stands

    @property
    def device(self) -> torch.device:
        """The device this rank computes on."""
        return self._device

    @property
    def backend_reason(self) -> str:
        """Which backend serves, and why, as a sentence."""
        return self._backend.reason

    @property
    def world_size(self) -> int:
        """Number of ranks, 1 without a launcher."""
        return dist.get_world_size()

    @property
    def process_index(self) -> int:
        """This rank."""
        return dist.get_rank()

    @property
    def local_process_index(self) -> int:
        """This rank's number on its machine."""
        return rank_place().local_rank

    @property
    def n_gpu(self) -> int:
        """Devices of this rank: 1 with an accelerator, else 0."""
        return 0 if self.device.type == "cpu" else 1

    @property
    def _setup_devices(self) -> torch.device:
        """`device`, under the name that other libraries read."""
        return self.device

    @property
    def _n_gpu(self) -> int:
        """`n_gpu`, under the name that other libraries read."""
        return self.n_gpu

    @property
    def distributed_state(self) -> DistributedState:
        """Where this rank stands, as Accelerate's PartialState says it."""
        return DistributedState(self.device)

    @property
    def parallel_mode(self) -> ParallelMode:
        """DISTRIBUTED with several ranks, else NOT_PARALLEL."""
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def mixed_precision(self) -> str:
        """What the forward computes in: "fp16", "bf16", or "no"; the launcher's if no field is set."""
        if self.fp16 or self.bf16:
            return "fp16" if self.fp16 else "bf16"
        return requested_precision()

    @property
    def place_model_on_device(self) -> bool | None:
        """A subclass may say False to keep the Trainer from moving the model; None: it decides."""
        return None

    @property
    def deepspeed_plugin(self) -> None:
        """None: DeepSpeed is not served."""

    @property
    def train_batch_size(self) -> int:
        """Samples of one micro-batch on this rank."""
        return rules.own_batch(self, self.per_device_train_batch_size)

    @property
    def eval_batch_size(self) -> int:
        """Samples of one evaluation batch on this rank."""
        return rules.own_batch(self, self.per_device_eval_batch_size)

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """`ddp_timeout` as a timedelta."""
        return timedelta(seconds=self.ddp_timeout)

    @property
    def should_log(self) -> bool:
        """Whether this rank logs."""
        return (self.local_process_index if self.log_on_each_node else self.process_index) == 0

    @property
    def should_save(self) -> bool:
        """Whether this rank writes checkpoints."""
        return (self.local_process_index if self.save_on_each_node else self.process_index) == 0

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Run the block on the main rank first; the others wait until it is through, then run it.

        A living main rank may take as long as it likes: no collective is open
        meanwhile, so `ddp_timeout` does not apply.

        Args:
            local: True: the first rank of each machine is its main rank; False: rank 0 alone.
            desc: what is done, for the error.

        Raises:
            PeerLostError: the main rank left its block with an exception, or is gone.
        """
        place = rank_place()
        first = self.process_index - place.local_rank if local else 0
        with Turns().first(first, desc):
            yield

    # Derived numbers and other forms

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Steps of warm-up in a run of so many steps."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * self.warmup_steps)

    def get_process_log_level(self) -> int:
        """The level of this rank's loggers, as a number of `logging`; that of paceline's for "passive"."""
        name = self.log_level if self.should_log else self.log_level_replica
        if name == "passive":
            return logging.getLogger("paceline").getEffectiveLevel()
        return logging.DEBUG if name == "detail" else int(getattr(logging, name.upper()))

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, as plain values; secrets are replaced by their field's name."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        return {
            name: f"<{name.upper()}>" if name.endswith("_token") else _plain(value)
            for name, value in values.items()
        }

    def to_json_string(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """`to_dict` and the batch sizes, with values that loggers take: bool, int, float, str."""
        values = self.to_dict() | {
            "train_batch_size": self.train_batch_size,
            "eval_batch_size": self.eval_batch_size,
        }
        return {
            name: value if type(value) in (bool, int, float, str) else str(value)
            for name, value in values.items()
        }


def _plain(value: Any) -> Any:
    """A value of a field (a subclass's too) as JSON can hold it, where it says how."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value.to_dict() if hasattr(value, "to_dict") and not isinstance(value, type) else value
