"""TrainingArguments: the same fields as Hugging Face's, parsed by their parser, and nothing ignored."""

from __future__ import annotations

import json
import logging
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from paceline.errors import ArgumentError, BackendUnavailableError
from paceline.train.arguments import TrainingArguments
from paceline.train.old_names import DROPPED, RENAMED
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
        *("--include_num_input_tokens_seen", "True", "--accelerator_config", '{"split_batches": true}'),
    ]
    (args,) = parser.parse_args_into_dataclasses(command)
    assert isinstance(args, TrainingArguments)
    assert (args.max_steps, args.learning_rate, args.lr_scheduler_type) == (7, 1e-3, "cosine")
    assert args.lr_scheduler_kwargs == {"num_cycles": 2}
    assert args.remove_unused_columns is False
    assert args.ddp_find_unused_parameters is False
    assert args.label_names == ["a", "b"]
    assert args.report_to == []
    assert args.include_num_input_tokens_seen == "all"
    assert args.accelerator_config.split_batches
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
        ({"report_to": "carrier pigeon"}, "report_to"),
        ({"fp16": True, "bf16": True}, "fp16 and bf16"),
        ({"fp16_full_eval": True, "bf16_full_eval": True}, "fp16_full_eval"),
        ({"label_smoothing_factor": 1.0}, "label_smoothing_factor"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "eval_strategy"),
        ({"include_num_input_tokens_seen": "some"}, "include_num_input_tokens_seen"),
        ({"include_for_metrics": ["weather"]}, "weather"),
        ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy"),
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


def test_groups_of_fields_are_set_as_hugging_face_sets_them(tmp_path: Path) -> None:
    """The same calls on both classes leave the same values in all fields."""
    theirs_class = pytest.importorskip("transformers").TrainingArguments
    calls: list[tuple[str, dict[str, Any]]] = [
        ("set_training", {"learning_rate": 1e-3, "batch_size": 4, "num_epochs": 2, "seed": 5}),
        ("set_evaluate", {"strategy": "steps", "steps": 10, "batch_size": 3, "loss_only": True}),
        ("set_testing", {"batch_size": 5}),
        ("set_save", {"strategy": "epoch", "total_limit": 2}),
        ("set_logging", {"strategy": "steps", "steps": 20, "first_step": True}),
        ("set_optimizer", {"name": "sgd", "learning_rate": 2e-3, "args": "momentum=0.9"}),
        ("set_lr_scheduler", {"name": "cosine", "max_steps": 100, "warmup_steps": 0.1}),
        ("set_dataloader", {"train_batch_size": 6, "num_workers": 2, "sampler_seed": 3}),
    ]
    ours, theirs = arguments(tmp_path), theirs_class(str(tmp_path), use_cpu=True)
    for name, values in calls:
        assert getattr(ours, name)(**values) is ours
        getattr(theirs, name)(**values)
    left_out = {"accelerator_config", "disable_tqdm", "eval_delay", "debug", "report_to"}
    want = {name: value for name, value in theirs.to_dict().items() if name not in left_out}
    assert {name: value for name, value in ours.to_dict().items() if name not in left_out} == want
    assert ours.eval_delay == 0  # theirs is None after set_evaluate, and then training raises
    config = {**theirs.to_dict()["accelerator_config"], "use_configured_state": False}  # theirs loses it
    assert ours.to_dict()["accelerator_config"] == config


@pytest.mark.parametrize(
    ("name", "values", "word"),
    [
        ("set_training", {"batch_size": 0}, "per_device_train_batch_size"),
        ("set_evaluate", {"strategy": "steps", "steps": 2.5}, "eval_steps"),
        ("set_evaluate", {"strategy": "often"}, "eval_strategy"),
        ("set_save", {"strategy": "steps", "steps": 0}, "save_steps"),
        ("set_logging", {"steps": 0}, "logging_steps"),
        ("set_logging", {"report_to": "carrier pigeon"}, "carrier pigeon"),
        ("set_optimizer", {"name": "lomo"}, "optim"),
        ("set_lr_scheduler", {"name": "greedy"}, "lr_scheduler_type"),
        ("set_push_to_hub", {"model_id": "me/model"}, "push_to_hub|hub_model_id"),
        ("set_dataloader", {"num_workers": -1}, "dataloader_num_workers"),
    ],
)
def test_what_no_field_of_a_group_can_be_is_refused_at_once(
    tmp_path: Path, name: str, values: dict[str, Any], word: str
) -> None:
    with pytest.raises(ArgumentError, match=word):
        getattr(arguments(tmp_path), name)(**values)


@pytest.mark.parametrize(
    ("old", "value", "new", "means"),
    [
        ("warmup_ratio", 0.1, "warmup_steps", 0.1),
        ("no_cuda", True, "use_cpu", True),
        ("group_by_length", True, "train_sampling_strategy", "group_by_length"),
        ("adafactor", True, "optim", "adafactor"),
        ("include_inputs_for_metrics", True, "include_for_metrics", ["inputs"]),
        ("include_tokens_per_second", True, "include_num_input_tokens_seen", "all"),
        ("per_gpu_train_batch_size", 3, "per_device_train_batch_size", 3),
        ("evaluation_strategy", "epoch", "eval_strategy", "epoch"),
        ("overwrite_output_dir", True, "output_dir", None),
        ("save_safetensors", True, "output_dir", None),
    ],
)
def test_old_names_are_taken_with_a_warning(
    tmp_path: Path, old: str, value: Any, new: str, means: Any
) -> None:
    """Also by a subclass, whose constructor is generated from its fields."""

    @dataclass
    class More(TrainingArguments):
        extra: int = 3

    for made in (TrainingArguments, More):
        with pytest.warns(FutureWarning, match=old):
            args = made(output_dir=str(tmp_path), **{old: value})
        assert means is None or getattr(args, new) == means


def test_old_names_that_say_nothing_say_nothing(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    arguments(tmp_path, warmup_ratio=0.0, adafactor=False, group_by_length=False)
    assert not [each for each in recwarn if issubclass(each.category, FutureWarning)]


def test_old_names_that_contradict_or_cannot_be_met_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="save_safetensors=False"):
        arguments(tmp_path, save_safetensors=False)
    with pytest.raises(ArgumentError, match="contradict"), pytest.warns(FutureWarning):
        arguments(tmp_path, adafactor=True, optim="sgd")
    with pytest.raises(TypeError, match="no_such_field"):
        arguments(tmp_path, no_such_field=1)


def test_old_names_are_no_fields_and_new_ones_are() -> None:
    today = {each.name for each in fields(TrainingArguments)}
    assert not today & (RENAMED.keys() | DROPPED.keys())
    assert {new for new, _, _ in RENAMED.values()} <= today


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"gradient_accumulation_kwargs": {"adjust_scheduler": False}}, "adjust_scheduler"),
        ({"gradient_accumulation_kwargs": {"num_steps": 3}}, "num_steps"),
        ({"speed": 9}, "speed"),
        ("nowhere.json", "nowhere.json"),
    ],
)
def test_settings_of_accelerate_that_are_not_served_are_named(tmp_path: Path, config: Any, word: str) -> None:
    with pytest.raises(ArgumentError, match=word):
        arguments(tmp_path, accelerator_config=config, gradient_accumulation_steps=2)


def test_settings_of_accelerate(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"split_batches": True}))
    theirs = pytest.importorskip("transformers.trainer_pt_utils").AcceleratorConfig(split_batches=True)
    for config in ({"split_batches": True}, '{"split_batches": true}', str(file), theirs):
        args = arguments(tmp_path, accelerator_config=config)
        assert args.accelerator_config.split_batches  # type: ignore[union-attr]
    args = arguments(tmp_path, accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 4}})
    assert args.gradient_accumulation_steps == 4


def test_what_scripts_ask_the_arguments(tmp_path: Path) -> None:
    args = arguments(tmp_path, log_level="info")
    assert args.get_process_log_level() == logging.INFO
    assert args.parallel_mode.value == "not_parallel"
    assert args.distributed_state.distributed_type == "NO"
    assert args.distributed_state.is_main_process
    assert args.deepspeed_plugin is None
    assert args.place_model_on_device is None
    assert args._setup_devices.type == "cpu"
    assert arguments(tmp_path, hub_token=None).mixed_precision == "no"
    assert arguments(tmp_path, bf16=True).mixed_precision == "bf16"
    theirs = pytest.importorskip("transformers.training_args").ParallelMode
    assert args.parallel_mode == theirs.NOT_PARALLEL
    assert args.parallel_mode != theirs.DISTRIBUTED


def test_printing_the_arguments_gives_no_secret_away(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    args.hub_token = "hf_secret"
    assert "hf_secret" not in repr(args) + args.to_json_string()
    assert "learning_rate=5e-05" in repr(args)
