"""A script may end, or its group, while Gloo still lets go of what a collective held: the rank ends well."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.ranks import BACKEND

LIMIT_S = 60
SCRIPT = """
import sys
import time

import torch
import torch.distributed as dist

import paceline

rank, rendezvous, where, backend, ending = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=2)


class SlowToGo:
    \"\"\"A callback that whoever lets go of it last is busy with.\"\"\"

    def __call__(self, future):
        return future.value()[0]

    def __del__(self):
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            pass


def slow_hook(group, bucket):
    time.sleep(0.1 * (rank == 0))  # so that on rank 1 the callback is there first and Gloo's thread calls it
    return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(SlowToGo())


if ending == "destroy":  # torch's own wrapper is the last to hold the group
    from paceline.comm.leaving import let_gloo_rest_before_groups_end
    let_gloo_rest_before_groups_end()
    wrapper = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
else:
    wrapper = paceline.DistributedDataParallel(torch.nn.Linear(4, 4))
if where == "hook":
    wrapper.register_comm_hook(None, slow_hook)
wrapper(torch.ones(2, 4)).sum().backward()
if where == "user":
    slow_hook(None, type("Bucket", (), {"buffer": lambda self: torch.ones(4)})()).wait()
if ending == "exception":
    raise ValueError("record 17 is torn")
if ending == "destroy":
    dist.destroy_process_group()
    del wrapper
"""


@pytest.mark.parametrize("ending", ["end", "exception"])
@pytest.mark.parametrize("where", ["hook", "user"])
def test_ranks_end_as_their_script_does(where, ending, tmp_path):
    check(where, ending, BACKEND, tmp_path / "store")


def test_a_group_that_only_torchs_wrapper_holds_ends_as_well(tmp_path):
    check("user", "destroy", "gloo", tmp_path / "store")


def check(where, ending, backend, store):
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(store), where, backend, ending],
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
    assert [process.returncode for process in started] == [int(ending == "exception")] * 2, said
