"""Hosts of a SLURM step, from the variables that srun sets."""

from __future__ import annotations

import pytest

from paceline.errors import ArgumentError
from paceline.launch.config import Hosts
from paceline.launch.slurm import first_host, hosts_of_slurm
from tests.launch.test_flags import job, parse  # noqa: F401

STEP = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def test_srun_names_the_hosts(job: str) -> None:  # noqa: F811
    config = parse("--nproc_per_node=4", job, **STEP)
    assert config.ranks_per_host == 4
    assert config.hosts == Hosts(2, 2, 1, "gpu07", 24567, job="slurm-1234567.0")
    assert parse("--num_processes=8", job, **STEP).ranks_per_host == 4
    named = parse("--main_process_ip=10.0.0.1", "--main_process_port=29500", job, **STEP)
    assert (named.hosts.address, named.hosts.port) == ("10.0.0.1", 29500)


def test_outside_of_srun_and_on_one_host_nothing_changes(job: str) -> None:  # noqa: F811
    assert hosts_of_slurm({"SLURM_JOB_ID": "1", "SLURM_NNODES": "2"}, {}) == {}
    one = {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
    assert parse(job, **one).hosts == Hosts()


@pytest.mark.parametrize(
    ("change", "words", "text"),
    [
        ({"SLURM_STEP_NUM_TASKS": "8"}, [], "srun started 8 launchers on 2 host.*--ntasks-per-node=1"),
        ({}, ["--num_machines=3"], "--num_machines asks for 3 hosts, but srun runs on 2"),
        ({"SLURM_NODEID": "x"}, [], "SLURM_NODEID is 'x'"),
        ({"SLURM_STEP_NODELIST": ""}, [], "names no host; write --main_process_ip"),
    ],
)
def test_counts_that_disagree_are_an_error(
    job: str,  # noqa: F811
    change: dict[str, str],
    words: list[str],
    text: str,
) -> None:
    with pytest.raises(ArgumentError, match=text):
        parse(*words, job, **{**STEP, **change})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[07-08]", "gpu07"),
        ("gpu[007,9-12],cpu1", "gpu007"),
        ("rack[1-2]-n", "rack1-n"),
        ("a-b.c[3]", "a-b.c3"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
