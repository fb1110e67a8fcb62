"""Starts ranks for a test, and sees to it that they end.

    def average(rank, world_size, scale):            # a module-level function
        value = torch.tensor(scale * rank)
        dist.all_reduce(value)
        return value.item()

    assert run_ranks(average, 2, 10.0) == [10.0, 10.0]

`run_ranks` gives what each rank returned and raises when one failed; `rank_outcomes` says what became of
each rank, for tests in which some are meant to fail, hang or be killed.

Ranks are forked from a server that has imported torch once, so that starting one costs milliseconds. Each
has a session of its own, which is killed as a whole at the end, and dies with the process that started it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_PRELOAD = ["torch", "torch.distributed", "torch.nn.parallel.distributed"]
_PR_SET_PDEATHSIG = 1

# Of the process group each rank finds, where a test does not say; the suites run on others as well.
BACKEND = os.environ.get("PACELINE_TEST_BACKEND", "gloo")


class RankError(AssertionError):
    """A rank raised, died, or did not end in time; the text carries its traceback."""


@dataclass
class Outcome:
    """What became of one rank.

    Attributes:
        rank: its number.
        value: what the function returned; None when it did not return.
        error: the traceback of the exception that left the function; None when none did.
        timed_out: whether the rank was cut off at the time limit.
        exit_code: of its process, negative for a signal, 0 when it ended by itself.
        seconds: how long the function ran, without start-up; None when the rank said nothing.
        stack: where a rank that was cut off stood, shortly before.
    """

    rank: int
    value: Any = None
    error: str | None = None
    timed_out: bool = False
    exit_code: int | None = None
    seconds: float | None = None
    stack: str = ""

    @property
    def returned(self) -> bool:
        """Whether the function came to its end."""
        return self.error is None and not self.timed_out and self.seconds is not None

    def __str__(self) -> str:
        if self.timed_out:
            return f"rank {self.rank} did not end in time; it stood here:\n{self.stack or '(unknown)'}"
        if self.error is not None:
            return f"rank {self.rank} raised:\n{self.error}"
        if self.returned:
            return f"rank {self.rank} returned {self.value!r}"
        return f"rank {self.rank} ended with exit code {self.exit_code} without a report"


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    backend: str | None = BACKEND,
    group_timeout: float = 30.0,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Runs `function(rank, world_size, *args)` in `world_size` fresh processes.

    Args:
        function: a module-level function; it and `args` travel by pickle, as does what it returns.
        timeout: seconds after which all ranks are killed.
        backend: of the default process group each rank finds (file rendezvous); None brings up none, and
            leaves MASTER_ADDR and MASTER_PORT for the function to use.
        group_timeout: seconds after which a collective of that group fails.
        environment: variables the ranks get in addition.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankError: with the traceback of the rank that failed first.
    """
    outcomes = _run(function, world_size, args, timeout, backend, group_timeout, environment, grace=5.0)
    failures = [outcome for outcome in outcomes if not outcome.returned]
    if failures:
        raise RankError("\n".join(str(failure) for failure in sorted(failures, key=_first_cause)))
    return [outcome.value for outcome in outcomes]


def rank_outcomes(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    backend: str | None = BACKEND,
    group_timeout: float = 30.0,
    environment: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """As `run_ranks`, but says what became of each rank, and lets the others go on when one fails."""
    return _run(function, world_size, args, timeout, backend, group_timeout, environment, grace=None)


def free_port() -> int:
    """A TCP port of the loopback address that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _first_cause(outcome: Outcome) -> tuple[bool, float]:
    """Order of blame: ranks cut off at the end only waited for somebody; then who failed soonest."""
    return outcome.timed_out, outcome.seconds if outcome.seconds is not None else 0.0


def _run(
    function: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    timeout: float,
    backend: str | None,
    group_timeout: float,
    environment: Mapping[str, str] | None,
    grace: float | None,
) -> list[Outcome]:
    context = get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory(prefix="paceline-ranks-") as name:
        folder = Path(name)
        job = pickle.dumps((function, args))
        common = dict(
            os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), **(environment or {})
        )
        processes: list[BaseProcess] = []
        try:
            for rank in range(world_size):
                place = {
                    "RANK": rank,
                    "LOCAL_RANK": rank,
                    "WORLD_SIZE": world_size,
                    "LOCAL_WORLD_SIZE": world_size,
                }
                variables = common | {key: str(value) for key, value in place.items()}
                setting = (backend, group_timeout, timeout)
                process = context.Process(
                    target=_rank_main, args=(job, rank, world_size, variables, folder, setting)
                )
                process.start()
                processes.append(process)
            cut = _wait(processes, folder, timeout, grace)
        finally:
            _kill(processes)
        return [_outcome(rank, process, folder, rank in cut) for rank, process in enumerate(processes)]


def _wait(processes: list[BaseProcess], folder: Path, timeout: float, grace: float | None) -> set[int]:
    """Waits for reports or ends; returns the ranks that gave neither in time."""
    deadline = time.monotonic() + timeout
    failed = False
    while True:
        pending = {rank for rank, process in enumerate(processes) if not _over(rank, process, folder)}
        if grace is not None and not failed and _any_failed(processes, folder):
            failed, deadline = True, min(deadline, time.monotonic() + grace)
        if not pending or time.monotonic() > deadline:
            break
        connection.wait([processes[rank].sentinel for rank in pending], timeout=0.01)
    (folder / "over").touch()
    for process in processes:
        process.join(5.0 if not pending else 0.0)
    return pending


def _over(rank: int, process: BaseProcess, folder: Path) -> bool:
    return (folder / f"rank{rank}").exists() or process.exitcode is not None


def _any_failed(processes: list[BaseProcess], folder: Path) -> bool:
    return any(
        (folder / f"failed{rank}").exists() or (process.exitcode or 0) != 0
        for rank, process in enumerate(processes)
    )


def _kill(processes: list[BaseProcess]) -> None:
    """Ends the ranks that are left, and whatever any rank started and left behind."""
    for process in processes:
        if process.is_alive():
            process.kill()
        if process.pid is not None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
    for process in processes:
        process.join(5.0)


def _outcome(rank: int, process: BaseProcess, folder: Path, cut: bool) -> Outcome:
    outcome = Outcome(rank, timed_out=cut, exit_code=process.exitcode)
    report, stack = folder / f"rank{rank}", folder / f"stack{rank}"
    if report.exists():
        outcome.value, outcome.error, outcome.seconds = pickle.loads(report.read_bytes())
    elif stack.exists():
        outcome.stack = stack.read_text()
    return outcome


def _rank_main(
    job: bytes,
    rank: int,
    world_size: int,
    variables: dict[str, str],
    folder: Path,
    setting: tuple[str | None, float, float],
) -> None:
    """The whole life of a rank."""
    backend, group_timeout, timeout = setting
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(variables)
    with (folder / f"stack{rank}").open("w") as stack:
        faulthandler.dump_traceback_later(max(timeout - 1.0, timeout / 2), file=stack)
        began = time.monotonic()
        value, error = None, None
        try:
            _bring_up(rank, world_size, backend, group_timeout, folder)
            began = time.monotonic()
            function, args = pickle.loads(job)
            value = function(rank, world_size, *args)
            report = pickle.dumps((value, None, time.monotonic() - began))
        except BaseException:
            error = traceback.format_exc()
            (folder / f"failed{rank}").touch()
            report = pickle.dumps((None, error, time.monotonic() - began))
        _write_whole(folder / f"rank{rank}", report)
        faulthandler.cancel_dump_traceback_later()
        # Stay until all are done: a rank that leaves early would tear the connections of those that go on.
        while not (folder / "over").exists() and folder.exists():
            time.sleep(0.005)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if error else 0)


def _bring_up(rank: int, world_size: int, backend: str | None, group_timeout: float, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend is not None:
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_timeout),
        )


def _write_whole(path: Path, content: bytes) -> None:
    aside = path.with_name(f".{path.name}")
    aside.write_bytes(content)
    aside.rename(path)
