"""Where the time of a small all-reduce goes between the script and the kernel: one rank, which meets nobody.

    python benchmarks/call.py

Each line is part of the one above it that is indented less. Times are those of the quickest of many short
runs: disturbances only ever add.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import timeit
from typing import Any

import torch
import torch.distributed as dist

CALLS, ROUNDS = 1000, 200
LINES = {
    "dist.all_reduce(tensor)": "everything, as a script calls it",
    "  options_of_torch()": "torch's options object, filled in",
    "  group.allreduce([tensor], options)": "the process group",
    "    looks_at_call()": "reads of torch's objects: is this the commonest call?",
    "      options.reduceOp == SUM": "the operation, a new object at each read",
    "      options.timeout <= UNSET": "the timeout, a new object as well",
    "    run(prepared, address)": "the kernel, through ctypes",
    "MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, buffer)": "everything of mpi4py and MPICH",
}


def what_is_timed() -> dict[str, Any]:
    """The names in ``LINES``; there is a default process group."""
    from paceline.comm.calls import TYPES
    from paceline.comm.local import reduce_call
    from paceline.comm.native import Kind
    from paceline.comm.through_gloo import UNSET

    group: Any = dist.group.WORLD
    tensor, memory, total = torch.zeros(1), group._memory, dist.ReduceOp.SUM
    call = reduce_call(Kind.all_reduce, torch.float32, torch.float32, (0, 1.0), 1, 0)
    kept = memory.prepare(call, 1800.0)

    def options_of_torch() -> Any:
        options = dist.AllreduceOptions()
        options.reduceOp = total
        options.asyncOp = False
        return options

    options = options_of_torch()

    def looks_at_call() -> bool:
        return (
            not options.asyncOp
            and tensor.layout is torch.strided
            and tensor.is_cpu
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and options.reduceOp == total
            and options.timeout <= UNSET
            and tensor.dtype in TYPES
        )

    names = {"dist": dist, "group": group, "tensor": tensor, "options": options, "SUM": total, "UNSET": UNSET}
    names |= {"options_of_torch": options_of_torch, "looks_at_call": looks_at_call, "kept": kept}
    names |= {"run": memory.run_prepared, "prepared": kept.address(), "address": tensor.data_ptr()}
    if importlib.util.find_spec("mpi4py"):
        from mpi4py import MPI

        names |= {"MPI": MPI, "buffer": [tensor.numpy(), MPI.FLOAT]}
    return names


def main(arguments: list[str]) -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(arguments)
    torch.set_num_threads(1)
    dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)
    names = what_is_timed()
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} cores\n")
    for line, meaning in LINES.items():
        if "MPI" in line and "MPI" not in names:
            continue
        seconds = min(timeit.repeat(line.strip(), number=CALLS, repeat=ROUNDS, globals=names)) / CALLS
        print(f"{line:50}{seconds * 1e6:6.2f} us   {meaning}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
