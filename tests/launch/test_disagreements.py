"""Ranks that disagree, with nothing but torch.distributed's own calls on Gloo: who, where, and what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch.launching import run, script

JOB = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
kind, odd = sys.argv[1], os.environ["RANK"] == "1"
if kind == "comes late" and odd:
    time.sleep(60)
dist.init_process_group("gloo", timeout=timedelta(seconds=3))
def ordinary(size):
    dist.all_reduce(torch.ones(size))
ordinary(10)
time.sleep(1.2)
if kind == "another size":
    ordinary(500 if odd else 1000)
if kind == "another call" and odd:
    dist.barrier()
if kind == "another root":
    dist.broadcast(torch.ones(1000), int(odd))
if kind == "crashes" and odd:
    os.abort()
ordinary(10)
if kind == "other groups first":
    one, other = dist.new_group(), dist.new_group()
    for group in (other, one) if odd else (one, other):
        dist.all_reduce(torch.ones(10), group=group)
"""
WAITED = r"had waited \d\.\d s for a collective"
REPORTS = {
    "another size": (
        134,
        rf"Rank [01] was at job.py:10 in ordinary \(there in torch/distributed/distributed_c10d.py:\d+ in "
        rf"all_reduce\)\. Rank [01] {WAITED} \(all_reduce\) at job.py:10 in ordinary.*"
        r"killed by SIGABRT: Gloo gave up, because the ranks called different collectives.*",
    ),
    "another call": (
        1,
        rf".*the ranks wait for different things, so nobody gets on\. Rank 0 {WAITED} \(all_reduce\) at "
        rf"job.py:10 in ordinary\. Rank 1 {WAITED} \(barrier\) at job.py:16\. All ranks must call.*",
    ),
    "another root": (
        1,
        rf".*all ranks came, and yet it did not end\. Ranks 0 and 1 {WAITED} \(broadcast\) at job.py:18\. .*",
    ),
    "comes late": (
        1,
        r"rank 1 held up the others \(alive, pid \d+\).*"
        r"rank 1 held up the others: it was asleep for \d\.\d s at job.py:7\. "
        rf"Rank 0 {WAITED} \(init_process_group\) at job.py:8\. Look at that line.*",
    ),
    "other groups first": (
        1,
        r"rank 0 waited in vain \(ended by the launcher, pid \d+\) rank 1 waited in vain, too .*"
        rf"Rank 0 {WAITED} \(all_reduce\) in process group 1 at job.py:25\. "
        rf"Rank 1 {WAITED} \(all_reduce\) in process group 2 at job.py:25\. .* for longer than the timeout",
    ),
    "crashes": (
        134,
        rf"Rank 1 was at job.py:20\. Rank 0 {WAITED} \(all_reduce\) at job.py:10 in ordinary.*",
    ),
}


@pytest.mark.parametrize("kind", REPORTS)
def test_what_they_disagree_on_is_told_with_the_lines(tmp_path: Path, kind: str) -> None:
    status, report = REPORTS[kind]
    done = run("--num_processes", "2", script(tmp_path, JOB), kind)
    assert done.returncode == status, done.stderr
    lead = "paceline launch: "
    said = [line.removeprefix(lead) for line in done.stderr.splitlines() if line.startswith(lead)]
    assert re.search(report, " ".join(said)), said
