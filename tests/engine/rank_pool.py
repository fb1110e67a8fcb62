"""Ranks that stay alive from one program to the next, and start anew when a program has confused them."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import tempfile
import threading
import time
import traceback
import warnings
from multiprocessing import forkserver
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import TracebackType

from tests.engine.defects import Planted
from tests.engine.programs import Program, simpler_programs
from tests.ranks import RankError, run_ranks

LIMIT_S = 60.0  # for one program, on a machine that is busy with other things
GROUP_TIMEOUT_S = 20.0
LIFE_S = 3600.0


def serve(rank: int, world: int, address: str, stacks: str) -> None:
    """A rank: run the programs that come over the connection until it ends."""
    from tests.engine.interpreter import Interpreter, Report
    from tests.engine.reference import NotAProgramError

    warnings.simplefilter("ignore")
    stack = Path(stacks, f"stack{rank}").open("w")  # noqa: SIM115 - as long as the rank lives
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    with Client(address) as driver:
        driver.send((rank, os.getpid()))
        while True:
            try:
                program = driver.recv()
            except EOFError:
                return
            interpreter = None
            try:
                interpreter = Interpreter(program, rank)
                report = interpreter.run()
            except NotAProgramError as error:
                report = Report(invalid=str(error))
            except Exception:
                report = interpreter.report if interpreter else Report()
                position = interpreter.position if interpreter else -1
                at = f"statement {position}" if position >= 0 else "construction"
                broke = f"rank {rank}, {at}, unexpected:\n{traceback.format_exc()}"
                report.problem = f"{report.problem}\n{broke}" if report.problem else broke
                report.lost = True
            driver.send(report)


class RankPool:
    """Ranks of one world size, waiting for programs. A context manager.

    Args:
        world: number of ranks.
        defect: planted in their engine, see ``tests.engine.defects``.
    """

    def __init__(self, world: int, defect: str | None = None) -> None:
        self.world = world
        self.defect = defect
        self.averages_compared = 0
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-fuzz-")
        self._ranks: list[tuple[int, Connection]] = []
        self._thread: threading.Thread | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._folder.cleanup()

    def verdict(self, program: Program) -> str | None:
        """Run a program; None when all is well, else what went wrong.

        Raises:
            InvalidProgramError: plain PyTorch cannot run it either.
        """
        if not self._ranks:
            self._start()
        for _, connection in self._ranks:
            connection.send(program)
        reports, deadline = [], time.monotonic() + LIMIT_S
        for _, connection in self._ranks:
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                return self._hung()
            try:
                reports.append(connection.recv())
            except EOFError:
                self._end()
                return "a rank died"
        if any(report.invalid for report in reports):
            if all(report.invalid for report in reports):
                raise InvalidProgramError(reports[0].invalid)
            self._end()
            return "plain PyTorch cannot run it on some ranks only: " + repr([r.invalid for r in reports])
        self.averages_compared += reports[0].synchronised
        problems = [report.problem for report in reports if report.problem]
        different = any(report.facts != reports[0].facts for report in reports)
        if any(report.lost for report in reports) or different:
            self._end()
        if problems:
            return "\n".join(problems)
        if different:
            listed = "\n".join(f"  rank {rank}: {report.facts}" for rank, report in enumerate(reports))
            return f"the ranks hold different things:\n{listed}"
        return None

    def _start(self) -> None:
        address = str(Path(self._folder.name, f"driver{time.monotonic_ns()}"))
        with Listener(address, backlog=self.world) as listener:
            self._thread = threading.Thread(target=self._run, args=(address,), daemon=True)
            self._thread.start()
            connections = {}
            for _ in range(self.world):
                connection = listener.accept()
                rank, pid = connection.recv()
                connections[rank] = (pid, connection)
        self._ranks = [connections[rank] for rank in range(self.world)]

    def _run(self, address: str) -> None:
        with contextlib.suppress(RankError):
            run_ranks(
                Planted(self.defect, serve),
                self.world,
                address,
                self._folder.name,
                timeout=LIFE_S,
                group_timeout=GROUP_TIMEOUT_S,
            )

    def _hung(self) -> str:
        for pid, _ in self._ranks:
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        stacks = [f"rank {r}:\n{Path(self._folder.name, f'stack{r}').read_text()}" for r in range(self.world)]
        self._end()
        return f"no end after {LIMIT_S:.0f} s; the ranks stood here:\n" + "\n".join(stacks)

    def _end(self) -> None:
        ranks, self._ranks = self._ranks, []
        for _, connection in ranks:
            connection.close()
        if self._thread is not None:
            self._thread.join(1.0)
            if self._thread.is_alive():
                for pid, _ in ranks:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                self._thread.join(10.0)
            self._thread = None


class InvalidProgramError(Exception):
    """Plain PyTorch itself cannot run the program."""


class RankPools:
    """One pool for each world size that is asked for. A context manager.

    Args:
        defect: see ``RankPool``.
    """

    def __init__(self, defect: str | None = None) -> None:
        self._defect = defect
        # Ranks are forked from a server that has imported all of this, where none is running yet.
        forkserver.set_forkserver_preload(["tests.engine.interpreter"])
        forkserver.ensure_running()
        self._stack = contextlib.ExitStack()
        self._pools: dict[int, RankPool] = {}

    def __enter__(self) -> RankPools:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def verdict(self, program: Program) -> str | None:
        """As ``RankPool.verdict``, on as many ranks as the program asks for."""
        pool = self._pools.get(program.world)
        if pool is None:
            pool = self._pools[program.world] = self._stack.enter_context(
                RankPool(program.world, self._defect)
            )
        return pool.verdict(program)

    @property
    def averages_compared(self) -> int:
        """How many synchronising backwards have been held against the reference so far."""
        return sum(pool.averages_compared for pool in self._pools.values())

    def shrink(self, program: Program, verdict: str, trials: int = 150) -> tuple[Program, str]:
        """A smaller program that goes wrong as well, dropping one thing at a time, and how it does."""
        smaller = True
        while smaller and trials > 0:
            smaller = False
            for candidate in simpler_programs(program):
                trials -= 1
                found = self._verdict_or_none(candidate)
                if found is not None and _kind(found) == _kind(verdict):
                    program, verdict, smaller = candidate, found, True
                    break
                if trials <= 0:
                    break
        return program, verdict

    def _verdict_or_none(self, program: Program) -> str | None:
        try:
            return self.verdict(program)
        except InvalidProgramError:
            return None


def _kind(verdict: str) -> str:
    """What went wrong, without where: shrinking stays with one defect."""
    lines = verdict.splitlines()
    first = lines[0].partition(": ")[2] or lines[0]
    if "unexpected:" in lines[0]:
        first = next(line for line in lines[2:] if line and not line.startswith(" "))
    if ".grad is" in first:
        return f"gradient {'None' in first}"
    return first[:40]
