"""What a fault costs: seconds until the launchers are gone, exit status, what is left, and the last line.

    python benchmarks/faults.py [--timeout 6] [--faults kill exception ...]

Two Gloo ranks train under ``paceline.DistributedDataParallel`` until rank 1 is harmed in the middle of
training: on one host, and as two hosts whose launchers meet on this machine. A fault that can be seen ends
the run at once, one that cannot (a stopped process, a collective that one rank does not join) at the
process group's timeout.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

SCRIPT = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from paceline import DistributedDataParallel
dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["GROUP_TIMEOUT"])))
rank, fault = dist.get_rank(), os.environ["FAULT"]
net = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 1)))
for step in range(20):
    time.sleep(0.02)
    loss = net(torch.ones(8, 64)).sum()
    if rank == 1 and step == 10:
        with open(os.environ["WHEN"], "w") as file:
            file.write(str(time.time()))
        if fault == "kill": os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stop": os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "exception": raise ValueError("sample 17 of shard-0003.tar is corrupt")
        if fault == "exit": sys.exit(0)
        if fault == "skip": continue
        if fault == "barrier": dist.barrier()
    loss.backward()
"""
FAULTS = ("kill", "exception", "exit", "skip", "stop", "barrier")
LIMIT = 180  # seconds for one run


def harm(fault: str, hosts: int, timeout: float) -> str:
    """Run once; what came of it, as the columns of a row."""
    mark = f"FAULT_RUN={uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        when, job, port = Path(folder, "when"), Path(folder, "job.py"), free.getsockname()[1]
        job.write_text(SCRIPT)
        free.close()
        environment = {**os.environ, "FAULT": fault, "WHEN": str(when), "GROUP_TIMEOUT": str(timeout)}
        environment |= {"FAULT_RUN": mark.partition("=")[2], "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "paceline", "launch", "--cpu", f"--nproc_per_node={2 // hosts}"]
        meet = [f"--nnodes={hosts}", "--master_addr=127.0.0.1", f"--master_port={port}"] if hosts > 1 else []
        launches = [
            subprocess.Popen(
                [*command, *meet, *([f"--node_rank={host}"] if meet else []), str(job)],
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for host in range(hosts)
        ]
        said = [launch.communicate(timeout=LIMIT)[0] for launch in launches]
        took = time.time() - float(when.read_text())
        statuses = ",".join(str(launch.returncode) for launch in launches)
    last = said[0].splitlines()[-1] if said[0] else ""
    return f"{fault:<10} {hosts:>5} {took:>8.1f} {statuses:>7} {len(carrying(mark)):>5}  {last[:110]}"


def carrying(mark: str) -> list[int]:
    """The processes that have the mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue  # ended meanwhile, or another user's
    return found


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--timeout", type=float, default=6.0, help="the process group's, in seconds")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    arguments = parser.parse_args()
    print(f"{'fault':<10} {'hosts':>5} {'seconds':>8} {'status':>7} {'left':>5}  last line")
    for fault in arguments.faults:
        for hosts in (1, 2):
            print(harm(fault, hosts, arguments.timeout), flush=True)


if __name__ == "__main__":
    main()
