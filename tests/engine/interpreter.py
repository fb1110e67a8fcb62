"""Runs a program under the wrapper, and beside it what plain PyTorch does on every rank's data.

Each rank runs the whole reference by itself: one plain module per rank, whose gradients are replaced by their
mean after each backward that synchronises. What the reference says decides which statements make sense, so
that all ranks decide alike.
"""

from __future__ import annotations

import contextlib
import zlib
from dataclasses import dataclass, field

import torch
from torch import Tensor
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
from tests.engine.random_models import Net, PlannedError, losses
from tests.engine.reference import Reference, data_of, descend, run_backward, run_forward

TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2}


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
        for position, statement in enumerate(self.program.statements):
            self.position = position
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
                if all(key in self.outputs for key in statement.keys) and not self._ends_early(statement):
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
                reference.average(self._bypassed(statement))
        if message != expected:
            self._complain(f"backward came out as: {message}; right is: {expected}")
        if raised:
            self._zero_after_exception()
            return
        self._compare_gradients()
        if not statement.no_sync:
            self._compare_with_ranks()

    def _bypassed(self, statement: Backward) -> bool:
        """Whether any of the forwards went past the wrapper."""
        return any(key in self.reference.through_module for key in statement.keys)

    def _ends_early(self, statement: Backward) -> bool:
        """A limit of the engine: the first gradient may come inside an inner backward.

        That is so when re-entrant checkpointing meets a backward over several forwards of which one bypassed
        the wrapper; passes then end early, on some ranks more often than on others.
        """
        return self._bypassed(statement) and len(statement.keys) > 1 and self.program.model.has("reentrant")

    def _nobody_could_tell(self, statement: Backward, raised: set[int]) -> bool:
        """A backward that bypasses the wrapper and raises before the first gradient leaves no trace."""
        return self._bypassed(statement) and any(not self.reference.reached_now[rank] for rank in raised)

    def _try_backward(self, statement: Backward, outputs: dict[int, tuple[Tensor, Tensor]]) -> str:
        self.net.trap.armed = statement.fail_at if self.rank in statement.failing else None
        try:
            with self.wrapper.no_sync() if statement.no_sync else contextlib.nullcontext():
                run_backward(self.net, outputs, statement, self.rank)
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
            finite = want.isfinite()  # float16 may overflow in the model itself
            bound = TOLERANCE[right.dtype] * (1.0 + float(want.where(finite, 0.0).abs().max()))
            near = torch.isclose(have, want, rtol=0.0, atol=bound, equal_nan=True)
            if have.shape != want.shape or not bool(near.all()):
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
