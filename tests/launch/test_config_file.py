"""Accelerate's configuration file: where it is found, what is taken from it, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.errors import ArgumentError
from paceline.launch.config_file import default_config_file, find_config_file, read_config_file
from paceline.launch.questions import ask, write

# As `accelerate config` of version 1.15 writes it.
ACCELERATES = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: 0,1
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29501
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def read(folder: Path, content: str | dict[str, Any], name: str = "c.yaml") -> dict[str, Any]:
    path = folder / name
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return read_config_file(str(path), {})


def test_accelerates_own_file(tmp_path: Path) -> None:
    assert read(tmp_path, ACCELERATES) == {
        "gpu_ids": "0,1",
        "machine_rank": 1,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29501,
        "mixed_precision": "bf16",
        "num_machines": (2, 2),
        "num_processes": 4,
        "rdzv_backend": "static",
        "same_network": True,
    }


def test_json(tmp_path: Path) -> None:
    content = {"distributed_type": "NO", "num_processes": 3, "use_cpu": True, "mixed_precision": "no"}
    found = read(tmp_path, json.dumps(content), "c.json")
    assert found == {"num_processes": 3, "cpu": True, "mixed_precision": "no"}


def test_fsdp_and_dynamo(tmp_path: Path) -> None:
    content = {
        "distributed_type": "FSDP",
        "num_processes": -1,
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_offload_params": False,
            "state_dict_type": "FULL_STATE_DICT",
        },
        "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_use_dynamic": True},
        "deepspeed_config": {},
    }
    assert read(tmp_path, content) == {
        "use_fsdp": True,
        "fsdp_version": "2",
        "fsdp_offload_params": "false",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "dynamo_backend": "inductor",
        "dynamo_use_dynamic": True,
    }


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("num_process: 2", "there is no key 'num_process'"),
        ("num_processes: many", "num_processes: 'many' is not a number"),
        ("distributed_type: DEEPSPEED", "distributed_type DEEPSPEED: DeepSpeed is not supported"),
        ("distributed_type: XLA", "TPUs are not supported"),
        ("distributed_type: MULTI_ABACUS", "there is no such type"),
        ("compute_environment: AMAZON_SAGEMAKER", "SageMaker is not supported"),
        ("deepspeed_config: {zero_stage: 3}", "deepspeed_config: DeepSpeed"),
        ("tpu_name: my-tpu", "tpu_name: TPUs"),
        ("command_file: x", "command_file: TPUs"),
        ("mpirun_config: {mpirun_hostfile: hosts}", "mpirun_config: mpirun is not used"),
        ("fsdp_config: {fsdp_bogus: 1}", "fsdp_bogus: there is no such option"),
        ("mixed_precision: fp8", "fp8 is not supported; write bf16"),
        ("use_cpu: perhaps", "'perhaps' is neither true nor false"),
        ("- a\n- b", "is no list of `key: value`"),
        ("a: [", "cannot be read"),
    ],
)
def test_what_is_unknown_or_not_supported_is_refused_by_name(tmp_path: Path, content: str, text: str) -> None:
    with pytest.raises(ArgumentError, match=text) as refused:
        read(tmp_path, content)
    assert "c.yaml" in str(refused.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("num_processes: '2'", {"num_processes": 2}),
        ("num_processes: 2.0", {"num_processes": 2}),
        ("num_processes: null\nuse_cpu: null\ngpu_ids:\ndebug: ~\nfsdp_config: null", {}),
        ("use_cpu: 1", {"cpu": True}),
        ("use_cpu: 'Yes'", {"cpu": True}),
        ("use_cpu: 0", {}),
        ("gpu_ids: [0, 2]", {"gpu_ids": "0,2"}),
        ("gpu_ids: 0", {"gpu_ids": "0"}),
        ("mixed_precision: no", {"mixed_precision": "no"}),
        ("distributed_type: NO", {}),
        ("downcast_bf16: 'false'", {}),
        ("fsdp_config: {fsdp_min_num_params: 1.0e+8}", {"fsdp_min_num_params": 100_000_000}),
        ("fsdp_config: {fsdp_backward_prefetch_policy: X}", {"fsdp_backward_prefetch": "X"}),
        ("---\n# two hosts\nnum_machines: 2  # at least\n", {"num_machines": (2, 2)}),
    ],
)
def test_values_as_people_write_them(tmp_path: Path, content: str, expected: dict[str, Any]) -> None:
    assert read(tmp_path, content) == expected


def test_where_it_is_looked_for(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate.commands.config.config_args")
    assert str(default_config_file({})) == accelerate.default_yaml_config_file
    assert default_config_file({"HF_HOME": "/a", "XDG_CACHE_HOME": "/b"}) == Path(
        "/a/accelerate/default_config.yaml"
    )
    assert default_config_file({"XDG_CACHE_HOME": "/b"}) == Path(
        "/b/huggingface/accelerate/default_config.yaml"
    )
    environment = {"HF_HOME": str(tmp_path)}
    assert find_config_file(environment) is None and read_config_file(None, environment) == {}
    path = tmp_path / "accelerate" / "default_config.json"
    path.parent.mkdir()
    path.write_text('{"num_processes": 5}')
    assert read_config_file(None, environment) == {"num_processes": 5}


def answers(*texts: str) -> Any:
    left = list(texts)

    def answer(_: str) -> str:
        if not left:
            raise EOFError
        return left.pop(0)

    return answer


def test_what_is_asked_for_is_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launch.questions.count_devices", lambda: (0, "cpu"))
    path = tmp_path / "new" / "c.yaml"
    write(ask(answers("2", "1", "10.0.0.1", "", "none", "", "8", "bf16")), path)
    assert read_config_file(str(path), {}) == {
        "cpu": True,
        "num_machines": (2, 2),
        "machine_rank": 1,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29500,
        "num_processes": 8,
        "mixed_precision": "bf16",
        "rdzv_backend": "static",
    }
    assert [entry.name for entry in path.parent.iterdir()] == ["c.yaml"]
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    theirs = config_args.load_config_from_file(str(path))
    assert (theirs.num_processes, theirs.use_cpu, theirs.mixed_precision) == (8, True, "bf16")


def test_nothing_is_written_when_the_answers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launch.questions.count_devices", lambda: (2, "cuda"))
    with pytest.raises(ArgumentError, match="nothing was written"):
        ask(answers("no", "1"))
