"""What plain PyTorch does with a program on every rank's data, in one process: the right values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.programs import Backward, Forward, Program
from tests.engine.random_models import WIDTH, Net, PlannedError, losses

RATE = 0.05


class NotAProgramError(Exception):
    """Plain PyTorch itself cannot run this program."""


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
    heads = [first + second if statement.both_heads else first for first, second in parts]
    return sum(heads, torch.zeros(()))


def run_backward(net: Net, outputs: dict[int, tuple[Tensor, Tensor]], statement: Backward, rank: int) -> None:
    """The backward statement on one rank."""
    inputs = None if statement.only is None else net.trained_parameters(statement.only[rank])
    total_loss(outputs, statement).backward(retain_graph=statement.retain, inputs=inputs)


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
        self.check_due = False
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
        if self.passes != self.buffers_from_pass:
            self._follow_rank_0()
        self.buffers_from_pass = self.passes

    def _follow_rank_0(self) -> None:
        """Buffers are replaced and not written: graphs may need them."""
        if not self.program.options.broadcast_buffers:
            return
        for net in self.nets[1:]:
            for layer, first in zip(net.modules(), self.nets[0].modules(), strict=True):
                for name, buffer in first.named_buffers(recurse=False):
                    setattr(layer, name, buffer.clone())

    def backward(self, statement: Backward) -> set[int]:
        """Returns the ranks on which it raised."""
        raised = set()
        for rank, net in enumerate(self.nets):
            self.reached_now[rank].clear()
            net.trap.armed = statement.fail_at if rank in statement.failing else None
            with plain_pytorch():
                try:
                    run_backward(net, self.outputs[rank], statement, rank)
                except PlannedError:
                    raised.add(rank)
            net.trap.armed = None
            self.reached[rank] |= self.reached_now[rank]
        return raised

    def average(self, bypassed: bool) -> None:
        """What a synchronising backward does to what has been accumulated, and to buffers."""
        for parameters in zip(*[self.trained(rank) for rank in range(len(self.nets))], strict=True):
            held = [p.grad.to_dense().double() for p in parameters if p.grad is not None]
            if held:
                mean = torch.stack(held).sum(0) / len(parameters)
                for parameter in parameters:
                    parameter.grad = mean.to(parameter.dtype)
        self._follow_rank_0()
        self.judge_unused(bypassed)

    def judge_unused(self, bypassed: bool) -> None:
        """After a pass: was anything unused?

        Left open where a forward bypassed the wrapper after the module had changed: the gradient of a new
        parameter may come before the wrapper has seen that parameter.
        """
        self.check_due = True
        trained = [{id(p) for p in self.trained(rank)} for rank in range(len(self.nets))]
        clean = all(t <= now for t, now in zip(trained, self.reached_now, strict=True))
        certain = any(t - ever for t, ever in zip(trained, self.reached, strict=True))
        if clean and not (bypassed and self.changed_since_check):
            self.unused = "no"
        else:
            self.unused = "yes" if certain and not self.changed_since_check else "maybe"

    def module_changed(self) -> None:
        """The rules leave open whether what was unused before a change is an error after it."""
        self.changed_since_check = True
        if self.unused == "yes":
            self.unused = "maybe"
        self.watch()

    def checked(self) -> None:
        """A forward has checked for unused parameters, if a pass came before it."""
        if not self.check_due:
            return
        self.check_due = False
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
        raise NotAProgramError(f"{type(error).__name__}: {error}") from error
