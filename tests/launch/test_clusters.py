"""The files in docs/clusters say what `paceline launch` understands."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import yaml

from paceline.launch.config import Hosts
from tests.launch.test_flags import job, parse  # noqa: F401
from tests.launch.test_slurm import STEP

CLUSTERS = Path(__file__).resolve().parents[2] / "docs" / "clusters"


def test_kubernetes(job: str) -> None:  # noqa: F811
    service, indexed = yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text())
    spec = indexed["spec"]
    [container] = spec["template"]["spec"]["containers"]
    variables = {entry["name"]: entry.get("value", "1") for entry in container["env"]}
    words = container["command"] + container["args"]
    assert words[:2] == ["paceline", "launch"]
    config = parse(*(job if word == "train.py" else word for word in words[2:]), **variables)
    assert config.hosts == Hosts(2, 2, 1, "train-0.train", 29500)
    assert (config.ranks_per_host, config.max_restarts, config.script_arguments) == (2, 3, ("--epochs", "3"))
    assert config.hosts.most == spec["completions"] == spec["parallelism"]
    main = f"{indexed['metadata']['name']}-0.{spec['template']['spec']['subdomain']}"
    assert (
        config.hosts.address == main and service["metadata"]["name"] == spec["template"]["spec"]["subdomain"]
    )
    assert service["spec"]["selector"] == {"job-name": indexed["metadata"]["name"]}


def test_slurm(job: str) -> None:  # noqa: F811
    text = (CLUSTERS / "slurm.sh").read_text()
    line = next(line for line in text.splitlines() if line.startswith("srun "))
    words = [job if word == "train.py" else word for word in shlex.split(line)]
    assert words[:3] == ["srun", "paceline", "launch"]
    nodes = re.findall(r"--nodes=(\d+)", text)[0]
    step = {**STEP, "SLURM_STEP_NUM_TASKS": nodes, "SLURM_STEP_NUM_NODES": nodes}
    config = parse(*words[3:], **step)
    assert (config.ranks_per_host, config.hosts.most) == (8, int(nodes))
    assert "--ntasks-per-node=1" in text


def test_ray(job: str) -> None:  # noqa: F811
    tree = ast.parse((CLUSTERS / "ray_job.py").read_text())
    values = {"HOSTS": 2, "RANKS_PER_HOST": 4, "machine_rank": 1, "address": "10.0.0.1", "port": 4711}
    options = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    config = parse(*(eval(option, {}, values) for option in options), job)
    assert (config.ranks_per_host, config.hosts) == (4, Hosts(2, 2, 1, "10.0.0.1", 4711))
