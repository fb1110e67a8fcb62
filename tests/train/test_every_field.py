"""Every field of TrainingArguments, set to another value on two ranks: what must change does, nothing else.

A field that is accepted and ignored shows up as a change that does not come, one that does more than it
says as a change that nobody expects. Fields that are not served are in test_arguments.py.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.train.arguments import TrainingArguments
from paceline.train.callbacks import TrainerCallback
from paceline.train.rules import NOT_SERVED
from paceline.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.models import Sequences, settings, weights

NUMBERS = {"losses", "weights", "evaluations", "final evaluation", "best"}
EVALUATIONS = {"evaluations", "given to compute_metrics"}
EPOCH = {"max_steps": -1, "num_train_epochs": 1}
WORKER = {"dataloader_num_workers": 1}
ADAM = {"optim": "adamw_torch"}


@dataclass
class Trial:
    """One field set to another value.

    Attributes:
        value: the other value.
        seen: what comes out otherwise (keys of what `observe` gives).
        beside: fields set in this run and in the one it is held against.
        resumed: both runs go on from checkpoint-2 of another one.
    """

    value: Any
    seen: set[str] = field(default_factory=set)
    beside: dict[str, Any] = field(default_factory=dict)
    resumed: bool = False


TRIALS = {
    "per_device_train_batch_size": Trial(3, NUMBERS),
    "num_train_epochs": Trial(2, {*NUMBERS, *EVALUATIONS, "rates", "logs", "files"}, EPOCH),
    "max_steps": Trial(3, {*NUMBERS, "rates", "logs", "files"}),
    "learning_rate": Trial(0.5, {*NUMBERS, "rates"}),
    "lr_scheduler_type": Trial("constant", {*NUMBERS, "rates"}),
    "lr_scheduler_kwargs": Trial({"power": 3.0}, {*NUMBERS, "rates"}, {"lr_scheduler_type": "polynomial"}),
    "warmup_steps": Trial(2, {*NUMBERS, "rates"}),
    "optim": Trial("adagrad", NUMBERS),
    "optim_args": Trial("momentum=0.9", NUMBERS),
    "weight_decay": Trial(0.5, NUMBERS),
    "adam_beta1": Trial(0.5, NUMBERS, ADAM),
    "adam_beta2": Trial(0.5, NUMBERS, ADAM),
    "adam_epsilon": Trial(1.0, NUMBERS, ADAM),
    "gradient_accumulation_steps": Trial(2, NUMBERS),
    "average_tokens_across_devices": Trial(False, NUMBERS),
    "max_grad_norm": Trial(0.01, NUMBERS),
    "label_smoothing_factor": Trial(0.1, NUMBERS),
    "bf16": Trial(True, NUMBERS),
    "fp16": Trial(True, {*NUMBERS, "files"}),
    "bf16_full_eval": Trial(True, {"final evaluation"}),
    "fp16_full_eval": Trial(True, {"final evaluation"}),
    "tf32": Trial(False),
    "gradient_checkpointing": Trial(True, {"settings"}),
    "gradient_checkpointing_kwargs": Trial({"a": 1}, {"settings"}, {"gradient_checkpointing": True}),
    # A backend implies it; without one it is inductor, which takes a C++ compiler and its time.
    "torch_compile": Trial(True, set(), {"torch_compile_backend": "eager"}),
    "torch_compile_backend": Trial("eager", {"settings"}),
    "torch_compile_mode": Trial("default", set(), {"torch_compile_backend": "eager"}),
    "use_cache": Trial(True, {"settings"}),
    "neftune_noise_alpha": Trial(5.0, NUMBERS),
    "torch_empty_cache_steps": Trial(1),
    "auto_find_batch_size": Trial(True),
    "logging_strategy": Trial("epoch", {"losses", "logs", "rates"}),
    "logging_steps": Trial(2, {"losses", "logs", "rates"}),
    "logging_first_step": Trial(True, {"losses", "logs", "rates"}, {"logging_steps": 2}),
    "log_on_each_node": Trial(False),
    "logging_nan_inf_filter": Trial(False),
    "include_num_input_tokens_seen": Trial("all", {"metrics"}),
    "log_level": Trial("error", {"settings"}),
    "log_level_replica": Trial("error", {"settings"}),
    "disable_tqdm": Trial(False, {"settings"}),
    "report_to": Trial("tensorboard", {"settings", "files"}),
    "run_name": Trial("a name"),
    "project": Trial("a project"),
    "trackio_space_id": Trial("a space"),
    "trackio_bucket_id": Trial("a bucket"),
    "eval_strategy": Trial("epoch", EVALUATIONS),
    "eval_steps": Trial(3, {"evaluations"}),
    "eval_delay": Trial(3, EVALUATIONS),
    "per_device_eval_batch_size": Trial(1),
    "prediction_loss_only": Trial(True, {"given to compute_metrics", "metrics"}),
    "eval_on_start": Trial(True, EVALUATIONS),
    "eval_do_concat_batches": Trial(False, {"given to compute_metrics"}),
    "eval_use_gather_object": Trial(True),
    "eval_accumulation_steps": Trial(1),
    "include_for_metrics": Trial(["inputs", "loss"], {"given to compute_metrics"}),
    "batch_eval_metrics": Trial(True, {"given to compute_metrics"}),
    "save_only_model": Trial(True, {"files"}),
    "save_strategy": Trial("epoch", {"files"}),
    "save_steps": Trial(3, {"files"}),
    "save_on_each_node": Trial(True),
    "save_total_limit": Trial(1, {"files"}),
    "enable_jit_checkpoint": Trial(True, {"settings"}, {"save_strategy": "no"}),
    "load_best_model_at_end": Trial(True, {"weights", "final evaluation"}, {"greater_is_better": True}),
    "metric_for_best_model": Trial("count", {"best"}),
    "greater_is_better": Trial(True, {"best"}),
    "ignore_data_skip": Trial(True, NUMBERS, resumed=True),
    "restore_callback_states_from_checkpoint": Trial(True, {"settings"}, resumed=True),
    "full_determinism": Trial(True, {"settings"}),
    "seed": Trial(8, NUMBERS),
    "data_seed": Trial(8, NUMBERS),
    "accelerator_config": Trial({"split_batches": True}, NUMBERS),
    "dataloader_drop_last": Trial(True, {*NUMBERS, "rates", "logs", "files"}, EPOCH),
    "dataloader_num_workers": Trial(1),
    "dataloader_pin_memory": Trial(False),
    "dataloader_persistent_workers": Trial(True, set(), WORKER),
    "dataloader_prefetch_factor": Trial(3, set(), WORKER),
    "dataloader_multiprocessing_context": Trial("fork", set(), WORKER),
    "dataloader_in_order": Trial(False, set(), WORKER),
    "remove_unused_columns": Trial(False, {"columns"}),
    "label_names": Trial(["labels", "tokens"], {"given to compute_metrics"}),
    "train_sampling_strategy": Trial("sequential", NUMBERS),
    "length_column_name": Trial("other", NUMBERS, {"train_sampling_strategy": "group_by_length"}),
    "ddp_find_unused_parameters": Trial(False, {"settings"}),
    "ddp_bucket_cap_mb": Trial(3),
    "ddp_broadcast_buffers": Trial(False, {"settings"}),
    "ddp_static_graph": Trial(True, {"settings"}),
    "ddp_backend": Trial("gloo"),
    "ddp_timeout": Trial(77),
    "debug": Trial("underflow_overflow"),
    "skip_memory_metrics": Trial(False, {"metrics"}),
    "do_train": Trial(True),
    "do_eval": Trial(True),
    "do_predict": Trial(True),
    "resume_from_checkpoint": Trial("nowhere"),
    "local_rank": Trial("this rank"),
}

USUAL = {
    "learning_rate": 0.3,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "metric_for_best_model": "loss",
}


def test_every_field_is_tried() -> None:
    names = {each.name for each in fields(TrainingArguments)}
    assert set(TRIALS) == names - set(NOT_SERVED) - {"output_dir", "use_cpu"}  # which every run sets


class Tried(nn.Module):
    """A tagger with all that a field can reach: embeddings, a configuration, dropout, checkpointing."""

    main_input_name = "tokens"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.head, self.dropout = nn.Embedding(5, 8), nn.Linear(8, 5), nn.Dropout(0.1)
        self.config = SimpleNamespace(use_cache=True)
        self.checkpointing: Any = None
        self.columns: set[str] = set()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def gradient_checkpointing_enable(self, **settings: Any) -> None:
        self.checkpointing = settings

    def forward(self, tokens: Tensor, labels: Tensor | None = None, **more: Any) -> dict[str, Tensor]:
        self.columns.update(more)
        logits = self.head(self.dropout(self.embedding(tokens)))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Rows(Sequences):
    """With two columns that the forward does not take."""

    column_names = ("length", "other")

    def __getitem__(self, index: Any) -> Any:
        columns = {"length": lambda row: row % 5, "other": lambda row: row * 7 % 13}
        if isinstance(index, str):
            return [columns[index](row) for row in range(len(self))]
        return {**super().__getitem__(index), **{name: column(index) for name, column in columns.items()}}


class Looks(TrainerCallback):
    """Takes down what holds in the middle of training; its state is the number of steps it has seen."""

    def __init__(self, steps_seen: int = 0) -> None:
        self.steps_seen = self.steps_seen_before = steps_seen

    def state(self) -> dict[str, Any]:
        return {"args": {"steps_seen": self.steps_seen}, "attributes": {}}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps_seen += 1
        wrapper = self.trainer.model_wrapped
        self.found = {
            "steps seen before": self.steps_seen_before,
            "callbacks": self.trainer.callback_handler.callback_list,
            "signal": signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL,
            "level": logging.getLogger("paceline").level,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "ddp": (wrapper.find_unused_parameters, wrapper.broadcast_buffers, wrapper.static_graph),
            "use_cache": kwargs["model"].config.use_cache,
            "checkpointing": kwargs["model"].checkpointing,
            "compiled": kwargs["model"]._compiled_call_impl is not None,
        }


def observe(folder: Path, values: Mapping[str, Any], resume: Path | None = None) -> dict[str, Any]:
    """Train, evaluate, and say what came of it."""
    given: list[Any] = []

    def compute_metrics(prediction: Any, compute_result: bool = True) -> dict[str, float]:
        given.append([shape_of(each) for each in prediction])
        return {"count": 1.0}

    args, looks = settings(folder, **{**USUAL, **values}), Looks()
    trainer = Trainer(
        Tried(), args, None, Rows(14), Rows(7), compute_metrics=compute_metrics, callbacks=[looks]
    )
    looks.trainer = trainer
    output = trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    final, history = trainer.evaluate(), trainer.state.log_history
    logged = [entry for entry in history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in logged],
        "logs": [entry["step"] for entry in logged],
        "rates": [entry["learning_rate"] for entry in logged],
        "weights": list(weights(trainer.model).values()),
        "evaluations": [
            (entry["step"], entry["eval_loss"]) for entry in history[:-1] if "eval_loss" in entry
        ],
        "final evaluation": final["eval_loss"],
        "best": (trainer.state.best_metric, trainer.state.best_global_step),
        "files": sorted({path.name.split("tfevents")[0] for path in folder.rglob("*")}),
        "metrics": sorted({*output.metrics, *final}),
        "given to compute_metrics": given,
        "columns": sorted(trainer.model.columns),
        "settings": looks.found,
    }


def shape_of(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(shape_of(each) for each in value)
    return None if value is None else (type(value).__name__, tuple(value.shape))


def alike(one: Any, other: Any) -> bool:
    """Equal, numbers to rounding."""
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, Tensor):
        return torch.allclose(one, other, rtol=1e-6, atol=1e-7)
    return one == (pytest.approx(other, rel=1e-6) if isinstance(one, float) else other)


def try_all(rank: int, world_size: int, folder: Path) -> dict[str, set[str]]:
    """What comes out otherwise on this rank, for each field."""
    multiprocessing.set_start_method("fork", force=True)  # for workers: this process's own takes seconds
    references: dict[str, dict[str, Any]] = {}
    observe(folder / "whole", {})

    def run(name: str, trial: Trial, **values: Any) -> dict[str, Any]:
        try:
            resume = folder / "whole" / "checkpoint-2" if trial.resumed else None
            return observe(folder / name, {**trial.beside, **values}, resume)
        finally:
            logging.getLogger("paceline").setLevel(logging.NOTSET)
            torch.use_deterministic_algorithms(False)

    changed = {}
    for name, trial in TRIALS.items():
        beside = f"{trial.beside} {trial.resumed}"
        if beside not in references:
            references[beside] = run(f"beside {name}", trial)
        found = run(name, trial, **{name: rank if name == "local_rank" else trial.value})
        changed[name] = {key for key, value in references[beside].items() if not alike(found[key], value)}
    return changed


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_each_changes_what_it_says_and_nothing_else(tmp_path: Path) -> None:
    changed = run_ranks(try_all, 2, tmp_path, timeout=200)
    found = {name: set().union(*(each[name] for each in changed)) for name in TRIALS}
    wrong = {name: each for name, each in found.items() if each != TRIALS[name].seen}
    assert not wrong
