"""The command line: what is understood, what is refused, and in which words."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.errors import ArgumentError
from paceline.launch.flags import LaunchConfig, add_launch_arguments, config_from, resolve_num_processes


def parse(*arguments: str) -> LaunchConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_launch_arguments(parser)
    return config_from(*parser.parse_known_args(arguments))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").touch()
    return "job.py"


def test_defaults(job: str) -> None:
    assert parse(job) == LaunchConfig(script=job)


@pytest.mark.parametrize(
    "option", ["--num_processes", "--num-processes", "--nproc_per_node", "--nproc-per-node"]
)
@pytest.mark.parametrize("joined", [True, False])
def test_number_of_ranks_in_all_spellings(job: str, option: str, joined: bool) -> None:
    words = [f"{option}=3"] if joined else [option, "3"]
    assert parse(*words, job).num_processes == 3


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--cpu"], "cpu", True),
        (["--main_process_port", "29511"], "main_process_port", 29511),
        (["--main-process-port=29511"], "main_process_port", 29511),
        (["--log_dir", "logs"], "log_dir", "logs"),
        (["--log-dir", "logs"], "log_dir", "logs"),
        (["--tee", "3"], "tee", 3),
        (["--tee", "0:3,1:2"], "tee", {0: 3, 1: 2}),
        (["--max_restarts", "2"], "max_restarts", 2),
        (["--max-restarts=2"], "max_restarts", 2),
    ],
)
def test_options(job: str, words: list[str], field: str, value: object) -> None:
    assert getattr(parse(*words, job), field) == value


@pytest.mark.parametrize("spelling", ["-m", "--module"])
def test_module(spelling: str) -> None:
    config = parse(spelling, "package.train", "--lr", "1")
    assert (config.module, config.script, config.script_arguments) == (True, "package.train", ("--lr", "1"))


@pytest.mark.parametrize("spelling", ["--no_python", "--no-python"])
def test_no_python(spelling: str) -> None:
    config = parse(spelling, "sh", "-c", "true")
    assert (config.no_python, config.script, config.script_arguments) == (True, "sh", ("-c", "true"))


def test_parsing_stops_at_the_script(job: str) -> None:
    behind = ("--num_processes", "7", "-m", "--unknown", "--", "--cpu", "--help")
    config = parse("--num_processes", "2", job, *behind)
    assert config == LaunchConfig(script=job, script_arguments=behind, num_processes=2)


@pytest.mark.parametrize("option", ["--mixed_precision", "--nnodes=2", "--num_proc", "-x"])
def test_unknown_options_are_refused_by_name(job: str, option: str) -> None:
    with pytest.raises(ArgumentError, match=f"no option {option.split('=')[0]}"):
        parse(option, job)


def test_a_typing_error_gets_a_suggestion(job: str) -> None:
    with pytest.raises(ArgumentError, match="did you mean --num_processes"):
        parse("--num_proceses=2", job)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nowhere.py"], "no script 'nowhere.py'"),
        (["-m", "train.py"], "leave -m out"),
        (["-m", "--no_python", "train"], "exclude each other"),
        (["--no_python", "no-such-program-here"], "no program 'no-such-program-here'"),
        (["--log_dir", "job.py", "job.py"], "--log_dir 'job.py' is a file"),
    ],
)
def test_what_cannot_work_is_refused(job: str, words: list[str], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        parse(*words)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--num_processes", "0"], "'0' is no number of ranks"),
        (["--num_processes", "-1"], "'-1' is no number of ranks"),
        (["--num_processes", "two"], "'two' is no number of ranks"),
        (["--main_process_port", "65536"], "'65536' is not a port"),
        (["--tee", "4"], "'4' is not a choice of streams"),
        (["--tee", "0:3,x:1"], "is not a choice of streams"),
        (["--max_restarts", "-1"], "'-1' is not a count"),
        ([], "required: script"),
    ],
)
def test_bad_values_end_with_usage_and_status_2(
    job: str, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["launch", *words, *([job] if words else [])])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_refused_command_lines_return_2(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "nowhere.py"]) == 2
    assert "paceline launch: there is no script 'nowhere.py'" in capsys.readouterr().err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--version"], ["--help"], ["launch", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
    assert "--num_processes N" in capsys.readouterr().out


def test_one_rank_per_device_else_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launch.flags.device_count", lambda: 4)
    assert resolve_num_processes(LaunchConfig("job.py")) == 4
    assert resolve_num_processes(LaunchConfig("job.py", cpu=True)) == 1
    assert resolve_num_processes(LaunchConfig("job.py", num_processes=3)) == 3
    monkeypatch.setattr("paceline.launch.flags.device_count", lambda: 0)
    assert resolve_num_processes(LaunchConfig("job.py")) == 1


def test_torchruns_words_for_the_number_of_ranks(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launch.flags.device_count", lambda: 4)
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert [parse(f"--nproc-per-node={word}", job).num_processes for word in ("gpu", "cpu", "auto")] == [
        4,
        6,
        4,
    ]


def test_which_streams_go_where() -> None:
    plain, logged = LaunchConfig("job.py"), LaunchConfig("job.py", log_dir="logs")
    by_rank = LaunchConfig("job.py", log_dir="logs", tee={1: 2})
    assert (plain.logged_of(0), plain.tee_of(0)) == (0, 0)
    assert (logged.logged_of(0), logged.tee_of(0)) == (3, 0)
    assert (by_rank.logged_of(0), by_rank.logged_of(1), by_rank.tee_of(1)) == (0, 2, 2)
