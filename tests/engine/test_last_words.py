"""A rank that ends by an exception says so to the others, wherever it was raised."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.ranks import BACKEND

LIMIT_S = 90
SCRIPT = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import paceline
from tests.engine.nets import Chain, FailsInBackward, rank_input

rank, rendezvous, where, backend = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group(
    backend, init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timedelta(seconds=40)
)


def forward_that_raises(*_):
    raise ValueError("record 17 is torn")


net = Chain()
wrapper = paceline.DistributedDataParallel(net)
if where == "under a communication hook":
    wrapper.register_comm_hook(None, allreduce_hook)
for step in range(6):
    fails = rank == 1 and step == 3
    if fails and where == "in forward":
        net.b.register_forward_pre_hook(forward_that_raises)
    elif fails and where == "in backward":
        net.b.register_full_backward_hook(forward_that_raises)
    elif fails:
        raise ValueError("record 17 is torn")
    wrapper(rank_input(rank, step)).square().sum().backward()
"""


@pytest.mark.parametrize(
    "where", ["in forward", "in backward", "between two steps", "under a communication hook"]
)
def test_the_others_say_what_a_rank_raised_before_it_was_gone(where, tmp_path):
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store"), where, BACKEND],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=LIMIT_S)[1] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert "ValueError: record 17 is torn" in said[1].splitlines()[-1]
    (error,) = [line for line in said[0].splitlines() if "paceline.errors." in line]
    assert "rank 0" in error and "pass 4" in error
    assert "Rank 1 had raised ValueError: record 17 is torn" in error
