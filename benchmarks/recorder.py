"""What recording costs: a fact, and a training step with and without.

    python benchmarks/recorder.py [--rounds 30]

A fact is timed alone, in one process, in processor time: best and median of several rounds. Steps are timed
on two ranks that train a small model of many buckets on Gloo; recording is turned on and off in turn within
the same processes, so that both meet the same machine. The ratio of medians over rounds is what to look at.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from paceline import DistributedDataParallel
from paceline.recorder.layout import Kind, open_file
from paceline.recorder.ring import Recorder, SilentRecorder

FACTS = 20_000
STEPS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description="What recording costs: a fact, and a step with and without.")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each kind (default: 30)")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        time_facts(Path(folder), rounds)
        mp.spawn(time_steps, (2, folder, rounds), nprocs=2)


def time_facts(folder: Path, rounds: int) -> None:
    memory = open_file(folder, "facts", 0, 1)
    assert memory is not None
    for name, recorder in (("on", Recorder(memory, folder / "facts.names")), ("off", SilentRecorder())):
        add, waiting = recorder.add, recorder.waiting
        fact = [per_call(lambda add=add: add(Kind.LAUNCHED, 118, 3)) for _ in range(rounds)]
        wait = [per_call(lambda waiting=waiting: enter_and_leave(waiting)) for _ in range(rounds)]
        for what, times in (("a fact", fact), ("a wait", wait)):
            best, median = 1e6 * min(times), 1e6 * statistics.median(times)
            print(f"recording {name:3}  {what}: best {best:.2f} us, median {median:.2f} us")


def per_call(call: Callable[[], object]) -> float:
    began = time.thread_time()
    for _ in range(FACTS):
        call()
    return (time.thread_time() - began) / FACTS


def enter_and_leave(waiting: object) -> None:
    with waiting:  # type: ignore[attr-defined]
        pass


def time_steps(rank: int, world_size: int, folder: str, rounds: int) -> None:
    os.environ.update(PACELINE_RECORDS=f"{folder}/records", RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world_size)
    model = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(40))), bucket_cap_mb=0.02
    )
    seconds: dict[bool, list[float]] = {True: [], False: []}
    recorder, silent = model.reducer.statistics._recorder, SilentRecorder()
    for number in range(2 * rounds + 2):
        on = number % 2 == 0
        chosen = recorder if on else silent
        model.reducer.statistics._recorder = model.reducer.peers._recorder = chosen
        took = one_round(model)
        if number >= 2:  # the first two warm up
            seconds[on].append(took)
    if rank == 0:
        on, off = statistics.median(seconds[True]), statistics.median(seconds[False])
        buckets = len(model.reducer.layout.buckets)
        print(
            f"a step of {buckets} buckets, recording off: {1e3 * off:.2f} ms; on: {on / off:.3f} times that"
        )
    dist.destroy_process_group()


def one_round(model: nn.Module) -> float:
    batch = torch.ones(8, 64)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(STEPS):
        model(batch).sum().backward()
    return (time.perf_counter() - began) / STEPS


if __name__ == "__main__":
    main()
