"""Our own parser: what it makes of a command line is what Hugging Face's makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest

from paceline.errors import ArgumentError
from paceline.train.arguments import TrainingArguments
from paceline.train.parser import ArgumentParser


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Everything:
    """Every kind of field that both parsers read."""

    needed: int
    name: str = "anna"
    rate: float = 0.5
    share: float | None = None
    off: bool = False
    on_by_default: bool = True
    maybe: bool | None = None
    maybe_on: bool | None = True
    bare: bool = field(default=False, metadata={"aliases": ["-b"]})
    colour: Colour = Colour.RED
    size: Literal["small", "large", 3] = "small"
    numbers: list[int] = field(default_factory=lambda: [1, 2])
    words: list[str] | None = None
    text_or_list: None | str | list[str] = None  # noqa: RUF036  (Hugging Face's parser takes the second)
    text_or_truth: str | bool = "no"
    truth_or_text: bool | str = False
    settings: dict[str, Any] | str | None = None
    other: str | None = field(default=None, metadata={"help": "100 percent", "choices": ["x", "y"]})
    hidden: int = field(default=5, init=False)

    def __post_init__(self) -> None:
        self.hidden = self.needed


LINES = [
    "--needed 3",
    "--needed=3 --name bo --rate 1e-3 --share 2 --off --bare",
    "--needed 3 --off true --on_by_default false --maybe no --maybe_on F",
    "--needed 3 --no_on_by_default --no-maybe-on -b",
    "--needed 3 --on-by-default --off 0 --maybe 1",
    "--needed 3 --maybe_on --colour blue --size 3",
    "--needed 3 --numbers 4 5 6 --words a b --text_or_list hello --text-or-truth yes",
    "--needed 3 --text_or_truth --truth_or_text y --other x",
    "--needed 3 --needed 4 --name a --name b",
    "--needed 3 --colour red --size large --numbers 1",
]
WRONG = [
    "",
    "--needed",
    "--needed three",
    "--needed 3 --off perhaps",
    "--needed 3 --colour green",
    "--needed 3 --size huge",
    "--needed 3 --numbers x",
    "--needed 3 --other z",
    "--needed 3 --hidden 4",
    "--needed 3 --no_off",
    "--needed 3 --unknown 4",
    "--needed 3 --maybe",
]
FOR_TRAINING = [
    [],
    ["--bf16", "--max_steps", "7", "--learning-rate", "1e-3", "--lr_scheduler_type", "cosine"],
    ["--no_remove_unused_columns", "--ddp_find_unused_parameters", "False", "--no_dataloader_pin_memory"],
    ["--lr_scheduler_kwargs", '{"num_cycles": 2}', "--accelerator_config", '{"non_blocking": true}'],
    ["--gradient_checkpointing_kwargs", '{"use_reentrant": false}', "--warmup_steps", "0.25"],
    ["--label_names", "a", "b", "--include_for_metrics", "loss", "inputs", "--report_to", "none"],
    ["--include_num_input_tokens_seen", "True", "--eval_strategy", "steps", "--eval_steps", "5"],
    ["--optim", "sgd", "--optim_args", "momentum=0.9", "--logging_first_step", "--disable_tqdm", "true"],
    ["--train_sampling_strategy", "group_by_length", "--save_total_limit", "2", "--data_seed", "3"],
]


def theirs(kind: Any) -> Any:
    return pytest.importorskip("transformers").HfArgumentParser(kind)


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_means_the_same(line: str) -> None:
    (ours,) = ArgumentParser(Everything).parse_args_into_dataclasses(line.split())
    assert (ours,) == theirs(Everything).parse_args_into_dataclasses(line.split())


@pytest.mark.parametrize("line", WRONG)
def test_what_is_refused_there_is_refused_here(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    for parser in (ArgumentParser(Everything), theirs(Everything)):
        with pytest.raises((SystemExit, ValueError)):
            parser.parse_args_into_dataclasses(line.split())
    capsys.readouterr()


@pytest.mark.parametrize("words", FOR_TRAINING)
def test_training_arguments_mean_the_same(words: list[str], tmp_path: Path) -> None:
    line = ["--output_dir", str(tmp_path), "--use_cpu", *words]
    (ours,) = ArgumentParser(TrainingArguments).parse_args_into_dataclasses(line)
    (expected,) = theirs(TrainingArguments).parse_args_into_dataclasses(line)
    assert ours.to_dict() == expected.to_dict()


def test_every_option_of_training_arguments_is_there() -> None:
    def options(parser: Any) -> dict[str, Any]:
        found = {word: action for action in parser._actions for word in action.option_strings}
        return {word: (action.nargs, action.const, action.dest) for word, action in found.items()}

    assert options(ArgumentParser(TrainingArguments)) == options(theirs(TrainingArguments))


@dataclass
class Second:
    depth: int = 1


def test_several_dataclasses_further_arguments_and_remaining_words() -> None:
    results = []
    for parser in (ArgumentParser([Everything, Second]), theirs([Everything, Second])):
        parser.add_argument("--extra", type=int)
        words = ["--depth", "2", "--needed", "1", "--extra", "5", "--odd", "end"]
        results.append(parser.parse_args_into_dataclasses(words, return_remaining_strings=True))
    assert results[0] == results[1]
    assert results[0][1] == Second(2)
    assert results[0][3] == ["--odd", "end"]


def test_words_from_files_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside_script, named = tmp_path / "train.args", tmp_path / "more.txt"
    beside_script.write_text("--needed 1 --name file")
    named.write_text("--name named\n--rate 3")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py"), "--args_file", str(named), "--off"])
    for parser in (ArgumentParser(Everything), theirs(Everything)):
        (found,) = parser.parse_args_into_dataclasses(args_file_flag="--args_file")
        assert (found.needed, found.name, found.rate, found.off) == (1, "named", 3.0, True)
        (found,) = parser.parse_args_into_dataclasses(["--needed", "2"], args_filename=str(named))
        assert (found.needed, found.name) == (2, "named")


def test_dicts_json_and_yaml(tmp_path: Path) -> None:
    values = {"needed": 1, "numbers": [7], "depth": 4}
    (tmp_path / "a.json").write_text(json.dumps(values))
    (tmp_path / "a.yaml").write_text("needed: 1\nnumbers: [7]\ndepth: 4\n")
    parser = ArgumentParser((Everything, Second))
    expected = (Everything(1, numbers=[7]), Second(4))
    assert parser.parse_dict(values) == expected
    assert parser.parse_json_file(tmp_path / "a.json") == expected
    assert parser.parse_yaml_file(tmp_path / "a.yaml") == expected
    with pytest.raises(ArgumentError, match="colours"):
        parser.parse_dict({**values, "colours": 1})
    assert parser.parse_dict({**values, "colours": 1}, allow_extra_keys=True) == expected


@dataclass
class WithDict:
    settings: dict[str, Any] | None = None


@dataclass
class Undecided:
    value: int | list[int] | None = None


def test_a_dict_is_read_from_json_and_choices_of_types_are_refused() -> None:
    (found,) = ArgumentParser(WithDict).parse_args_into_dataclasses(["--settings", '{"a": 1}'])
    assert found.settings == {"a": 1}
    with pytest.raises(SystemExit):
        ArgumentParser(WithDict).parse_args_into_dataclasses(["--settings", "[1]"])
    with pytest.raises(ArgumentError, match="value"):
        ArgumentParser(Undecided)


def test_it_does_without_transformers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "sys.modules['transformers'] = None\n"
        "from paceline import ArgumentParser, TrainingArguments\n"
        "(args,) = ArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
        "print(args.max_steps, args.remove_unused_columns)\n"
    )
    command = [sys.executable, str(script), "--use_cpu", "--max_steps", "3", "--no_remove_unused_columns"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.stdout.split() == ["3", "False"], done.stderr


def test_help_shows_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--help"])
    text = capsys.readouterr().out
    assert all(f"--{each.name}" in text for each in fields(TrainingArguments))
