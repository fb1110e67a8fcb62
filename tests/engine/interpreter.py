"""Runs a program under the wrapper, and beside it what plain PyTorch does on every rank's data.

Each rank runs the whole reference by itself: one plain module per rank, whose gradients are replaced by their
mean after each backward that synchronises. What the reference says decides which statements make sense, so
that all ranks decide alike.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from paceline.engine.ddp import DistributedDataParallel
from paceline.errors import PeerFailedError, UnusedParametersError
from tests.engine.programs import (
    Backward,
    Evaluate,
    Forward,
    Grad,
    Keep,
    Program,
    Replace,
    SetTrained,
    Statement,
    Step,
    ZeroGrad,
)
from tests.engine.random_models import WIDTH, Net, PlannedError, losses

TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5, torch.bfloat16: 5e-2}
RATE = 0.05


class Mismatch(AssertionError):
    """The wrapper and the reference differ, in a way that leaves the ranks in step."""


class NotAProgram(Exception):
    """Plain PyTorch itself cannot run this program."""


@dataclass
class Report:
    """What one rank saw.

    Attributes:
        facts: what must be equal on all ranks: errors that were raised, checksums of averaged gradients.
        problem: the first mismatch, or None.
        lost: the program broke off, and the ranks may be out of step now.
        invalid: why plain PyTorch cannot run the program, or None.
        synchronised: number of backwards that were averaged and compared.
    """

    facts: list[str] = field(default_factory=list)
    problem: str | None = None
    lost: bool = False
    invalid: str | None = None
    synchronised: int = 0


def data_of(seed: int, rank: int) -> Tensor:
    """One rank's batch: two to four rows."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    rows = 2 + int(torch.randint(0, 3, (), generator=generator))
    return torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)


def run_forward(call: Any, model: Any, statement: Forward, rank: int) -> tuple[Tensor, Tensor]:
    """The two losses of a forward statement on one rank."""
    x = data_of(statement.seed, rank)
    penalised = statement.penalty and not model.has("reentrant")
    first, second = losses(model, call(x.requires_grad_(penalised), statement.use[rank]))
    if penalised:
        (slope,) = torch.autograd.grad(first, x, create_graph=True)
        first = first + slope.square().sum()
    return first, second


def total_loss(outputs: dict[int, tuple[Tensor, Tensor]], statement: Backward) -> Tensor:
    """The sum that a backward statement starts from."""
    parts = [outputs[key] for key in statement.keys]
    return sum((first + second if statement.both_heads else first for first, second in parts), torch.zeros(()))


def descend(net: nn.Module) -> None:
    """One step of gradient descent on what is trained."""
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad and parameter.grad is not None:
                parameter.sub_(RATE * parameter.grad.to_dense().to(parameter.dtype))


class Reference:
    """All ranks in one process, on plain modules.

    Attributes:
        reached: per rank, the trained parameters that any backward reached since the last check.
        reached_now: the same for the last backward.
        unused: what the wrapper must find at the next forward if unused parameters are not allowed:
            "no", "yes", or "maybe" where the rules leave it open.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.nets = [Net(program.model, program.seed) for _ in range(program.world)]
        self.outputs: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in self.nets]
        self.through_module: set[int] = set()
        self.reached: list[set[int]] = [set() for _ in self.nets]
        self.reached_now: list[set[int]] = [set() for _ in self.nets]
        self.unused = "no"
        self.changed_since_check = False
        self.passes = 0
        self.buffers_from_pass = -1
        self.averaged = False
        self._hooked: dict[int, nn.Parameter] = {}  # kept alive, so that no id is given out twice
        self.watch()

    def watch(self) -> None:
        """Note which parameters a backward reaches."""
        for rank, net in enumerate(self.nets):
            for parameter in net.parameters():
                if parameter.requires_grad and id(parameter) not in self._hooked:
                    self._hooked[id(parameter)] = parameter
                    parameter.register_post_accumulate_grad_hook(
                        lambda p, rank=rank: self.reached_now[rank].add(id(p))
                    )

    def trained(self, rank: int) -> list[nn.Parameter]:
        """The trained parameters of one rank."""
        return [p for p in self.nets[rank].parameters() if p.requires_grad]

    def forward(self, statement: Forward) -> None:
        if not statement.through_module:
            self._broadcast_buffers()
        else:
            self.through_module.add(statement.key)
        with plain_pytorch():
            for rank, net in enumerate(self.nets):
                self.outputs[rank][statement.key] = run_forward(net, self.program.model, statement, rank)

    def _broadcast_buffers(self) -> None:
        if self.program.options.broadcast_buffers and self.passes != self.buffers_from_pass:
            for net in self.nets[1:]:
                for buffer, first in zip(net.buffers(), self.nets[0].buffers(), strict=True):
                    if not torch.equal(buffer, first):  # graphs may need those that do not change
                        buffer.copy_(first)
        self.buffers_from_pass = self.passes

    def backward(self, statement: Backward) -> set[int]:
        """Returns the ranks on which it raised."""
        raised = set()
        for rank, net in enumerate(self.nets):
            self.reached_now[rank].clear()
            net.trap.armed = statement.fail_at if rank in statement.failing else None
            with plain_pytorch():
                try:
                    total_loss(self.outputs[rank], statement).backward(retain_graph=statement.retain)
                except PlannedError:
                    raised.add(rank)
            net.trap.armed = None
            self.reached[rank] |= self.reached_now[rank]
        return raised

    def average(self) -> None:
        """What a synchronising backward does to what has been accumulated."""
        for parameters in zip(*[self.trained(rank) for rank in range(len(self.nets))], strict=True):
            held = [p.grad.to_dense().double() for p in parameters if p.grad is not None]
            if held:
                mean = torch.stack(held).sum(0) / len(parameters)
                for parameter in parameters:
                    parameter.grad = mean.to(parameter.dtype)
        self.judge_unused()

    def judge_unused(self) -> None:
        """After a pass: was anything unused?"""
        trained = [{id(p) for p in self.trained(rank)} for rank in range(len(self.nets))]
        clean = all(t <= now for t, now in zip(trained, self.reached_now, strict=True))
        certain = any(t - ever for t, ever in zip(trained, self.reached, strict=True))
        self.unused = "no" if clean else "yes" if certain and not self.changed_since_check else "maybe"

    def module_changed(self) -> None:
        """The rules leave open whether what was unused before a change is an error after it."""
        self.changed_since_check = True
        if self.unused == "yes":
            self.unused = "maybe"
        self.watch()

    def checked(self) -> None:
        """A forward has checked for unused parameters."""
        self.unused, self.changed_since_check = "no", False
        for reached in self.reached:
            reached.clear()

    def forget(self, *keys: int) -> None:
        for outputs in self.outputs:
            for key in keys or tuple(outputs):
                outputs.pop(key, None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for net in self.nets:
            net.zero_grad(set_to_none)


@contextlib.contextmanager
def plain_pytorch() -> Iterator[None]:
    """What goes wrong inside goes wrong without any wrapper."""
    try:
        yield
    except PlannedError:
        raise
    except Exception as error:
        raise NotAProgram(f"{type(error).__name__}: {error}") from error


class Interpreter:
    """One program on this rank.

    Args:
        program: what to run.
        rank: of this process.
    """

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        self.options = program.options
        self.report = Report()
        self.reference = Reference(program)
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.outputs: dict[int, tuple[Tensor, Tensor]] = {}
        self.position = -1
        # Every rank starts from other values: construction makes them rank 0's.
        self.net = Net(program.model, program.seed + rank)
        arguments = {name: value for name, value in vars(program.options).items() if name != "hook"}
        self.wrapper = DistributedDataParallel(self.net, **arguments)
        if self.options.hook and not program.model.has("sparse_table"):
            self.wrapper.register_comm_hook(None, allreduce_hook)
        self._compare_state("after construction")

    def run(self) -> Report:
        for self.position, statement in enumerate(self.program.statements):
            self._run(statement)
        self._compare_state("at the end")
        for kept, values in self.kept:
            if not torch.equal(kept.to_dense(), values):
                self._complain("a gradient kept across zero_grad() changed")
        return self.report

    def _run(self, statement: Statement) -> None:
        match statement:
            case Forward():
                self._forward(statement)
            case Backward():
                if all(key in self.outputs for key in statement.keys):
                    self._backward(statement)
            case ZeroGrad():
                self.reference.zero_grad(statement.set_to_none)
                self.wrapper.zero_grad(statement.set_to_none)
            case Keep():
                self._keep()
            case SetTrained() | Replace():
                self._change(statement)
            case Grad():
                self._autograd_grad(statement)
            case Evaluate():
                self._evaluate(statement)
            case Step():
                self._step()

    # -- statements ---------------------------------------------------------------------------

    def _forward(self, statement: Forward) -> None:
        call = self.wrapper.module if statement.through_module else self.wrapper
        reference = self.reference
        expected = reference.unused if self._checks_unused() and not statement.through_module else "no"
        try:
            with self.wrapper.no_sync() if statement.no_sync else contextlib.nullcontext():
                outputs = run_forward(call, self.program.model, statement, self.rank)
        except UnusedParametersError as error:
            self.report.facts.append(f"{self.position}: unused parameters")
            if expected == "no":
                self._complain(f"nothing was unused, yet: {error}")
            reference.checked()
            return
        if expected == "yes":
            self._complain("parameters were unused in the last pass, and nothing was said")
        if not statement.through_module:
            reference.checked()
        self.outputs[statement.key] = outputs
        reference.forward(statement)
        for mine, right in zip(outputs, reference.outputs[self.rank][statement.key], strict=True):
            if not torch.allclose(mine.double(), right.double(), rtol=1e-4, atol=1e-6):
                self._complain(f"loss {mine.item()}, right is {right.item()}")

    def _checks_unused(self) -> bool:
        return not (self.options.find_unused_parameters or self.options.static_graph)

    def _backward(self, statement: Backward) -> None:
        reference = self.reference
        raised = reference.backward(statement)
        if not statement.retain or raised:
            reference.forget(*statement.keys)
        outputs = dict(self.outputs)
        if not statement.retain or raised:
            for key in statement.keys:
                del self.outputs[key]
        if not statement.no_sync and self._nobody_could_tell(statement, raised):
            self._zero_after_exception()
            return
        message = self._try_backward(statement, outputs)
        reference.passes += not statement.no_sync
        if raised:
            expected = "planned" if self.rank in raised else "fine" if statement.no_sync else "peer failed"
            reference.averaged = False
        else:
            expected = "fine"
            reference.averaged = not statement.no_sync
            if not statement.no_sync:
                reference.average()
        if message != expected:
            self._complain(f"backward came out as: {message}; right is: {expected}")
        if raised:
            self._zero_after_exception()
            return
        self._compare_gradients()
        if not statement.no_sync:
            self._compare_with_ranks()

    def _nobody_could_tell(self, statement: Backward, raised: set[int]) -> bool:
        """A backward that bypasses the wrapper and raises before the first gradient leaves no trace."""
        bypassed = any(key in self.reference.through_module for key in statement.keys)
        return bypassed and any(not self.reference.reached_now[rank] for rank in raised)

    def _try_backward(self, statement: Backward, outputs: dict[int, tuple[Tensor, Tensor]]) -> str:
        self.net.trap.armed = statement.fail_at if self.rank in statement.failing else None
        try:
            with self.wrapper.no_sync() if statement.no_sync else contextlib.nullcontext():
                total_loss(outputs, statement).backward(retain_graph=statement.retain)
        except PlannedError:
            return "planned"
        except PeerFailedError:
            return "peer failed"
        finally:
            self.net.trap.armed = None
        return "fine"

    def _zero_after_exception(self) -> None:
        self.reference.zero_grad()
        self.wrapper.zero_grad()
        if self.reference.unused == "yes":
            self.reference.unused = "maybe"

    def _keep(self) -> None:
        if not self.options.gradient_as_bucket_view:
            held = [p.grad for p in self.net.parameters() if p.grad is not None]
            self.kept += [(gradient, gradient.detach().to_dense().clone()) for gradient in held]
        self.reference.zero_grad()
        self.wrapper.zero_grad()

    def _change(self, statement: SetTrained | Replace) -> None:
        if self.program.model.has("reentrant", "checkpointed"):
            self._forget_graphs()  # they would be recomputed with other parameters than in forward
        for net in (*self.reference.nets, self.net):
            if isinstance(statement, Replace):
                net.replace(statement.layer, statement.seed)
            else:
                net.set_trained(statement.layer, statement.trained)
        self.reference.module_changed()

    def _autograd_grad(self, statement: Grad) -> None:
        if self.program.model.has("reentrant") or self.rank not in statement.ranks:
            return
        x = data_of(statement.seed, self.rank).requires_grad_()
        everything = tuple(range(len(self.program.model.layers)))
        trained = [p for p in self.net.parameters() if p.requires_grad]
        levels = [b.clone() for b in self.net.buffers()]
        first, second = losses(self.program.model, self.wrapper.module(x, everything))
        torch.autograd.grad(first + second, [x, *trained], allow_unused=True)
        for buffer, level in zip(self.net.buffers(), levels, strict=True):
            if not torch.equal(buffer, level):
                buffer.copy_(level)

    def _evaluate(self, statement: Evaluate) -> None:
        if self.rank in statement.ranks:
            everything = tuple(range(len(self.program.model.layers)))
            self.wrapper.eval()
            with torch.no_grad():
                self.wrapper(data_of(statement.seed, self.rank), everything)
            self.wrapper.train()

    def _step(self) -> None:
        if self.reference.averaged:
            self._forget_graphs()
            for net in (*self.reference.nets, self.net):
                descend(net)

    def _forget_graphs(self) -> None:
        self.reference.forget()
        self.outputs.clear()

    # -- comparing ------------------------------------------------------------------------------

    def _compare_gradients(self) -> None:
        """Mine against the reference's; the reference goes on from mine, so that rounding does not add up."""
        reference = self.reference
        mine = dict(self.net.named_parameters())
        for name, right in reference.nets[self.rank].named_parameters():
            have, want = mine[name].grad, right.grad
            if have is None or want is None:
                if have is not None or want is not None:
                    self._complain(f"{name}.grad is {have}, right is {want}")
                continue
            have, want = have.detach().to_dense().double(), want.to_dense().double()
            bound = TOLERANCE[right.dtype] * (1.0 + float(want.abs().max()))
            if have.shape != want.shape or not bool(((have - want).abs() <= bound).all()):
                self._complain(f"{name}.grad is {have.tolist()}, right is {want.tolist()}")
        if reference.averaged:
            for net in reference.nets:
                for name, parameter in net.named_parameters():
                    if parameter.requires_grad and mine[name].grad is not None:
                        parameter.grad = mine[name].grad.detach().clone()

    def _compare_with_ranks(self) -> None:
        self.report.synchronised += 1
        held = {n: p.grad for n, p in self.net.named_parameters() if p.requires_grad}
        sums = [(n, None if g is None else _checksum(g.detach().to_dense())) for n, g in held.items()]
        self.report.facts.append(f"{self.position}: {zlib.crc32(repr(sums).encode()):08x}")

    def _compare_state(self, when: str) -> None:
        right = self.reference.nets[self.rank].state_dict()
        for name, value in self.net.state_dict().items():
            if not torch.allclose(value, right[name], rtol=1e-6, atol=1e-9):
                self._complain(f"{when}: {name} is {value.tolist()}, right is {right[name].tolist()}")
        if not any("level" in name for name in right):
            self.report.facts.append(f"{when}: {[_checksum(v) for v in self.net.state_dict().values()]}")

    def _complain(self, what: str) -> None:
        if self.report.problem is None:
            at = f"statement {self.position}" if self.position >= 0 else "construction"
            self.report.problem = f"rank {self.rank}, {at}: {what}"


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
