"""The command line: what is understood, what is refused, and in which words."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.errors import ArgumentError
from paceline.launch.config import Hosts, LaunchConfig, Output
from paceline.launch.flags import add_launch_arguments, config_from
from paceline.launch.options import options
from paceline.launch.refused import reason_against

NOWHERE = {"HF_HOME": "/nonexistent"}  # no configuration file


def parse(*arguments: str, **environment: str) -> LaunchConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_launch_arguments(parser)
    return config_from(*parser.parse_known_args(arguments), {**NOWHERE, **environment})


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", "/nonexistent")
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
    assert parse(*words, job).ranks_per_host == 3


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--cpu"], "cpu", True),
        (["--main_process_port", "29511"], "hosts", Hosts(port=29511)),
        (["--master-port=29511"], "hosts", Hosts(port=29511)),
        (["--standalone"], "hosts", Hosts()),
        (["--nnodes=1"], "hosts", Hosts()),
        (["--log_dir", "logs"], "output", Output(log_dir="logs")),
        (["--log-dir", "logs"], "output", Output(log_dir="logs")),
        (["--tee", "3"], "output", Output(tee=3)),
        (["-t", "0:3,1:2"], "output", Output(tee={0: 3, 1: 2})),
        (["-r", "1"], "output", Output(redirects=1)),
        (["--redirects=0:3"], "output", Output(redirects={0: 3})),
        (["--log_rank_0_only"], "output", Output(rank_0_only=True)),
        (["--local-ranks-filter", "0,2"], "output", Output(local_ranks=(0, 2))),
        (["--max_restarts", "2"], "max_restarts", 2),
        (["--max-restarts=2"], "max_restarts", 2),
        (["--monitor-interval=0.5"], "look", 0.5),
        (["--shutdown_timeout", "7"], "grace", 7.0),
        (["--exit-timeout", "90"], "exit_timeout", 90.0),
        (["--signals-to-handle=SIGTERM,SIGUSR1"], "signals", (15, 10)),
        (["--role", "trainer"], "role", "trainer"),
        (["--start_method", "spawn"], "fork", False),
        (["--gpu_ids", "0, 2"], "gpu_ids", "0,2"),
        (["--gpu_ids", "all"], "gpu_ids", None),
        (["-q"], "quiet", True),
        (["--mixed_precision", "bf16"], "variables", {"ACCELERATE_MIXED_PRECISION": "bf16"}),
        (["--num_cpu_threads_per_process=3"], "variables", {"OMP_NUM_THREADS": "3"}),
        (["--debug"], "variables", {"ACCELERATE_DEBUG_MODE": "true"}),
        (["--enable_cpu_affinity"], "variables", {"ACCELERATE_CPU_AFFINITY": "1"}),
        (["--dynamo-backend=inductor"], "variables", {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}),
        (["--dynamo_use_dynamic"], "variables", {"ACCELERATE_DYNAMO_USE_DYNAMIC": "True"}),
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
    assert config == LaunchConfig(script=job, script_arguments=behind, ranks_per_host=2)


MAIN = ["--main_process_ip", "10.0.0.1"]


@pytest.mark.parametrize(
    ("words", "ranks", "hosts"),
    [
        (
            ["--num_processes=8", "--num_machines=2", "--machine_rank=1", *MAIN, "--main_process_port=29501"],
            4,
            Hosts(2, 2, 1, "10.0.0.1", 29501),
        ),
        (
            ["--nproc-per-node=3", "--nnodes=2", "--node-rank=0", "--master-addr=10.0.0.1"],
            3,
            Hosts(2, 2, 0, "10.0.0.1", 29500),
        ),
        (
            ["--nproc-per-node=3", "--nnodes=1:4", "--rdzv-endpoint=h0:29400", "--rdzv-id=7"],
            3,
            Hosts(1, 4, None, "h0", 29400, job="7"),
        ),
        (["--num_processes=8", "--num_machines", "1:4", *MAIN], 2, Hosts(1, 4, None, "10.0.0.1", 29500)),
        (["--rdzv_endpoint=[::1]:1", "--nnodes=2", "--rdzv-backend=c10d"], None, Hosts(2, 2, None, "::1", 1)),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:1"], None, Hosts(1, 1, None, "localhost", 1)),
        (
            ["--nnodes=2", "--node_rank=1", *MAIN, "--rdzv-conf=timeout=9,last_call_timeout=2,is_host=0"],
            None,
            Hosts(2, 2, 1, "10.0.0.1", 29500, is_main=False, join_timeout=9, last_call=2),
        ),
        (
            ["--nnodes=2", "--node_rank=1", *MAIN,
             "--rdzv_conf=keep_alive_interval=2,keep_alive_max_attempt=4"],
            None,
            Hosts(2, 2, 1, "10.0.0.1", 29500, silence=8),
        ),
    ],
)  # fmt: skip
def test_several_hosts(job: str, words: list[str], ranks: int | None, hosts: Hosts) -> None:
    config = parse(*words, job)
    assert (config.ranks_per_host, config.hosts) == (ranks, hosts)


def test_torchruns_variables_are_options(job: str) -> None:
    kubernetes = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4",
                  "PET_MASTER_ADDR": "main-0", "PET_MASTER_PORT": "23456"}  # fmt: skip
    config = parse(job, **kubernetes)
    assert (config.ranks_per_host, config.hosts) == (4, Hosts(2, 2, 1, "main-0", 23456))
    assert parse("--nproc_per_node=2", job, **kubernetes).ranks_per_host == 2
    with pytest.raises(ArgumentError, match="PET_NNODES: 'many' is no number of hosts"):
        parse(job, PET_NNODES="many")


def test_fsdp_sets_what_accelerates_launcher_sets(job: str) -> None:
    words = ["--use_fsdp", "--fsdp_version=2", "--fsdp_transformer_layer_cls_to_wrap=Block"]
    variables = parse(*words, job).variables
    assert variables.items() >= {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
        "FSDP_MIN_NUM_PARAMS": "100000000",
    }.items()  # fmt: skip
    with pytest.raises(ArgumentError, match="--fsdp_version does nothing without --use_fsdp"):
        parse("--fsdp_version=2", job)


@pytest.mark.parametrize("option", ["--bogus", "--num_proc", "-x", "--nodes=2"])
def test_unknown_options_are_refused_by_name(job: str, option: str) -> None:
    with pytest.raises(ArgumentError, match=f"no option {option.split('=')[0]}"):
        parse(option, job)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--use_deepspeed"], "--use_deepspeed: DeepSpeed is not supported.*--use_fsdp"),
        (["--zero-stage", "2"], "--zero-stage: DeepSpeed"),
        (["--tpu"], "--tpu: TPUs are not supported"),
        (["--megatron_lm_tp_degree=2"], "--megatron_lm_tp_degree: Megatron"),
        (["--fp8_format", "E4M3"], "--fp8_format: fp8 is not supported; write --mixed_precision bf16"),
        (["--run-path"], "leave it out"),
        (["--mpirun_hostfile=x"], "mpirun is not used"),
    ],
)
def test_unsupported_options_are_refused_with_what_to_write_instead(
    job: str, words: list[str], text: str
) -> None:
    with pytest.raises(ArgumentError, match=text):
        parse(*words, job)


def peers_options(parser: argparse.ArgumentParser) -> list[str]:
    return [spelling for action in parser._actions for spelling in action.option_strings]


def test_every_option_of_the_peers_is_taken_or_refused() -> None:
    """Read from the installed packages, so that nothing is passed over when they get a new one."""
    launch = pytest.importorskip("accelerate.commands.launch")
    import torch.distributed.run

    ours = {spelling for option in options() for spelling in option.spellings()}
    theirs = peers_options(launch.launch_command_parser())
    theirs += peers_options(torch.distributed.run.get_args_parser())
    assert len(theirs) > 150
    unheard_of = [s for s in theirs if s not in ours and reason_against(s) is None]
    assert unheard_of in ([], ["-h", "--help"], ["-h", "--help", "-h", "--help"])
    both = [s for s in theirs if s in ours and reason_against(s) is not None]
    assert both == []


def test_the_peers_switches_and_values_are_ours() -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    import torch.distributed.run

    ours = {spelling: option for option in options() for spelling in option.spellings()}
    theirs = [*launch.launch_command_parser()._actions, *torch.distributed.run.get_args_parser()._actions]
    refused = set()
    for action in theirs:
        for option in (ours[spelling] for spelling in action.option_strings if spelling in ours):
            assert (action.nargs == 0) == (option.read is None), option.key
            values = [*(action.choices or ()), action.default] if option.read else []
            for value in values:
                try:
                    assert value is None or option.read is None or option.read(str(value)) is not None
                except argparse.ArgumentTypeError:
                    refused.add(value)
    # Not supported; a slip of theirs; of torchrun's, which is about functions and not about scripts.
    assert refused == {"fp8", "torhchxla_trace_once", "fork"}


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
        (["--cpu", "--multi_gpu", "job.py"], "--multi_gpu and --cpu exclude each other"),
        (["--multi_gpu", "--num_processes=1", "job.py"], "needs two or more ranks"),
        (["--standalone", "--nnodes=2", "job.py"], "--standalone is for one host"),
        (["--num_machines=2", "job.py"], "write --main_process_ip ADDRESS"),
        (["--num_machines=2", *MAIN, "job.py"], "write --machine_rank I"),
        (["--num_machines=2", *MAIN, "--machine_rank=2", "job.py"], "--machine_rank 2 does not exist"),
        (["--num_machines=2", *MAIN, "--machine_rank=0", "--num_processes=3", "job.py"], "multiple of 2"),
        (["--num_processes=3", "--nproc_per_node=2", "job.py"], "disagree"),
        (["--nnodes=2", "--rdzv_backend=c10d", "--rdzv_endpoint=h:x", "job.py"], "'x' is not a port"),
        (["--config_file", "nowhere.yaml", "job.py"], "nowhere.yaml.*No such file"),
        (["nowhere.train"], "no script 'nowhere.train'.*; to start a module write -m nowhere.train$"),
        (["-"], r"no script '-' \(looked in [^;]+$"),
        (["/dev/null"], "'/dev/null' is no file"),
    ],
)
def test_what_cannot_work_is_refused(job: str, words: list[str], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        parse(*words)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--num_processes", "0"], "'0' is not a number"),
        (["--num_processes", "-1"], "'-1' is not a number"),
        (["--nproc_per_node", "two"], "'two' is no number of ranks"),
        (["--main_process_port", "65536"], "'65536' is not a port"),
        (["--tee", "4"], "'4' is not a choice of streams"),
        (["--tee", "0:3,x:1"], "is not a choice of streams"),
        (["--max_restarts", "-1"], "'-1' is not a count"),
        (["--nnodes", "3:2"], "is no number of hosts"),
        (["--rdzv_backend", "etcd"], "'etcd' is not one of static, c10d"),
        (["--rdzv_conf", "protocol=x"], "there is no setting 'protocol'"),
        (["--mixed_precision", "fp8"], "fp8 is not supported; write bf16"),
        (["--start_method", "fork"], "'fork' is not one of forkserver, spawn"),
        (["--signals_to_handle", "SIGKILL"], "'SIGKILL' cannot be passed on"),
        (["--shutdown_timeout", "soon"], "'soon' is not a time"),
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


def test_a_folder_that_was_deleted_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    for words in (["job.py"], ["-m", "job"], ["--no_python", "sh"], [__file__]):
        with pytest.raises(ArgumentError, match="the current folder was deleted"):
            parse(*words)


def test_refused_command_lines_return_2(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "nowhere.py"]) == 2
    assert "paceline launch: there is no script 'nowhere.py'" in capsys.readouterr().err


def help_page(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["launch", *words])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_fits_the_eyes(capsys: pytest.CaptureFixture[str]) -> None:
    page = help_page("--help", capsys=capsys)
    first = page.partition("most used:\n")[2].partition("\n\n")[0]
    assert len(re.findall(r"^  --\w+.* {2,}\w", first, re.MULTILINE)) == 10
    assert "--num_processes N" in page
    assert len(page.splitlines()) < 60
    for option in options():
        assert f"--{option.key}" in page


def test_the_long_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    page = " ".join(help_page("--help-all", capsys=capsys).split())
    for option in options():
        assert f"--{option.key}" in page and option.help in page


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--version"], ["--help"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0


def test_torchruns_words_for_the_number_of_ranks(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launch.options.device_count", lambda: 4)
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    words = ("gpu", "cpu", "auto")
    assert [parse(f"--nproc-per-node={word}", job).ranks_per_host for word in words] == [4, 6, 4]


def test_which_streams_go_where() -> None:
    def choice(output: Output, local_rank: int = 0) -> tuple[int, int, int]:
        return output.logged(local_rank), output.teed(local_rank), output.shown(local_rank, local_rank)

    assert choice(Output()) == (0, 0, 3)
    assert choice(Output(log_dir="logs")) == (3, 0, 3)
    by_rank: Any = {1: 2}
    assert choice(Output(log_dir="logs", tee=by_rank)) == (0, 0, 3)
    assert choice(Output(log_dir="logs", tee=by_rank), 1) == (2, 2, 3)
    assert choice(Output(redirects=1)) == (1, 0, 2)
    assert choice(Output(rank_0_only=True)) == (0, 0, 3)
    assert choice(Output(rank_0_only=True), 1) == (0, 0, 0)
    assert choice(Output(local_ranks=(1,))) == (0, 0, 0)
