"""TrainingArguments: the same fields as Hugging Face's, parsed by their parser, and nothing ignored."""

from __future__ import annotations

import json
import logging
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from paceline.errors import ArgumentError, BackendUnavailableError
from paceline.train.arguments import TrainingArguments
from paceline.train.rules import NOT_SERVED


def default_of(each: Any) -> Any:
    return each.default if each.default is not MISSING else each.default_factory()


def arguments(folder: Path, **values: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), use_cpu=True, **values)


def test_fields_and_defaults_are_hugging_faces() -> None:
    theirs = pytest.importorskip("transformers").TrainingArguments
    ours = {each.name: default_of(each) for each in fields(TrainingArguments)}
    assert ours == {each.name: default_of(each) for each in fields(theirs) if each.init}


def test_every_field_has_help() -> None:
    assert all(len(each.metadata["help"]) > 8 for each in fields(TrainingArguments))


def test_hf_argument_parser_reads_it(tmp_path: Path) -> None:
    parser = pytest.importorskip("transformers").HfArgumentParser(TrainingArguments)
    command = [
        *("--output_dir", str(tmp_path), "--use_cpu", "--max_steps", "7", "--learning-rate", "1e-3"),
        *(
            "--lr_scheduler_type",
            "cosine",
            "--lr_scheduler_kwargs",
            '{"num_cycles": 2}',
            "--warmup_steps",
            "0.25",
        ),
        *("--no_remove_unused_columns", "--ddp_find_unused_parameters", "False", "--report_to", "none"),
        *("--label_names", "a", "b", "--bf16", "--ddp_bucket_cap_mb", "3"),
    ]
    (args,) = parser.parse_args_into_dataclasses(command)
    assert isinstance(args, TrainingArguments)
    assert (args.max_steps, args.learning_rate, args.lr_scheduler_type) == (7, 1e-3, "cosine")
    assert args.lr_scheduler_kwargs == {"num_cycles": 2}
    assert args.remove_unused_columns is False
    assert args.ddp_find_unused_parameters is False
    assert args.label_names == ["a", "b"]
    assert args.report_to == []
    assert args.get_warmup_steps(100) == 25


def test_values_may_be_hugging_faces_enums(tmp_path: Path) -> None:
    trainer_utils = pytest.importorskip("transformers.trainer_utils")
    args = arguments(tmp_path, eval_strategy=trainer_utils.IntervalStrategy.EPOCH, save_strategy="epoch")
    assert args.eval_strategy == "epoch"
    assert args.do_eval


@pytest.mark.parametrize("name", NOT_SERVED)
def test_a_field_that_is_not_served_raises_when_it_is_set(tmp_path: Path, name: str) -> None:
    default = next(default_of(each) for each in fields(TrainingArguments) if each.name == name)
    other = not default if isinstance(default, bool) else "something"
    with pytest.raises(ArgumentError, match=name):
        arguments(tmp_path, **{name: {"a": 1} if name.endswith("_config") or name == "deepspeed" else other})


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"lr_scheduler_type": "greedy"}, "lr_scheduler_type"),
        ({"optim": "lomo"}, "optim"),
        ({"logging_steps": 0}, "logging_steps"),
        ({"logging_steps": 2.5}, "logging_steps"),
        ({"save_steps": 0}, "save_steps"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"dataloader_prefetch_factor": 2}, "dataloader_prefetch_factor"),
        ({"dataloader_persistent_workers": True}, "dataloader_persistent_workers"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end"),
        ({"load_best_model_at_end": True, "eval_strategy": "epoch"}, "load_best_model_at_end"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 4},
            "multiple",
        ),
        ({"save_strategy": "best"}, "metric_for_best_model"),
        ({"report_to": "tensorboard"}, "report_to"),
        ({"lr_scheduler_kwargs": "{1"}, "lr_scheduler_kwargs"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"ddp_bucket_cap_mb": 0}, "ddp_bucket_cap_mb"),
        ({"ddp_timeout": 0}, "ddp_timeout"),
        ({"local_rank": 3}, "local_rank"),
    ],
)
def test_what_cannot_work_is_refused_by_name(tmp_path: Path, values: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word) as caught:
        arguments(tmp_path, **values)
    assert isinstance(caught.value, ArgumentError)


@pytest.mark.parametrize("backend", ["nccl", "xccl", "hccl", "cncl", "mpi"])
def test_a_backend_that_is_not_here_names_those_that_are(tmp_path: Path, backend: str) -> None:
    with pytest.raises(BackendUnavailableError, match=r"(?s)" + backend + ".*available: .*gloo"):
        arguments(tmp_path, ddp_backend=backend)


def test_one_rank_has_a_process_group_as_well(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    assert dist.is_initialized()
    assert (args.world_size, args.process_index, args.local_process_index) == (1, 0, 0)
    assert args.device.type == "cpu"
    assert "shm" in args.backend_reason
    assert args.should_log
    assert args.should_save


def test_dict_and_json_hide_secrets_only(tmp_path: Path) -> None:
    args = arguments(tmp_path, learning_rate=0.25)
    assert args.to_dict()["learning_rate"] == 0.25
    assert args.to_dict()["hub_token"] == "<HUB_TOKEN>"
    assert json.loads(args.to_json_string())["max_steps"] == -1
    assert all(type(value) in (bool, int, float, str) for value in args.to_sanitized_dict().values())


def test_eval_steps_follow_logging_steps(tmp_path: Path) -> None:
    assert arguments(tmp_path, eval_strategy="steps", logging_steps=30).eval_steps == 30


def test_best_metric_defaults(tmp_path: Path) -> None:
    args = arguments(tmp_path, load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch")
    assert (args.metric_for_best_model, args.greater_is_better) == ("loss", False)
    args = arguments(tmp_path, metric_for_best_model="accuracy")
    assert args.greater_is_better is True


def test_progress_bar_goes_away_with_quiet_logging(tmp_path: Path) -> None:
    logger = logging.getLogger("paceline")
    before = logger.level
    try:
        logger.setLevel(logging.ERROR)
        assert arguments(tmp_path).disable_tqdm is True
        logger.setLevel(logging.WARNING)
        assert arguments(tmp_path).disable_tqdm is False
    finally:
        logger.setLevel(before)
