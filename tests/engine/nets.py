"""Small modules for the engine's tests, and the right gradients by plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Chain(nn.Module):
    """Linear layers with names a, b, c, applied in that order."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Branches(nn.Module):
    """A trunk and three branches; the caller says which branches take part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor, use: tuple[int, ...]) -> Tensor:
        hidden = self.trunk(x)
        return sum((self.branches[index](hidden) for index in use), hidden)


class FailsInBackward(torch.autograd.Function):
    """Identity whose backward raises when told to."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise ValueError("bad sample 4711")
        return gradient, None


def rank_input(rank: int, step: int = 0, rows: int = 3, width: int = 4) -> Tensor:
    """Data of one rank at one step."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(100 * step + rank))


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """Dense copies of all gradients by name."""
    return {
        n: None if p.grad is None else p.grad.detach().to_dense().clone()
        for n, p in module.named_parameters()
    }


def mean_gradients(
    world: int, build: Callable[[], nn.Module], run: Callable[[Any, int], None]
) -> dict[str, Tensor | None]:
    """What every rank must hold: ``run(module, rank)`` on each rank's data in one process, averaged.

    A rank without gradient counts as zero; None when no rank has one.
    """
    per_rank = []
    for rank in range(world):
        module = build()
        run(module, rank)
        per_rank.append(gradients(module))
    means: dict[str, Tensor | None] = {}
    for name in per_rank[0]:
        held = [found[name] for found in per_rank if found[name] is not None]
        means[name] = sum(held) / world if held else None
    return means


def assert_gradients(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> None:
    """Equal to rounding, None only where None is wanted."""
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        have = found[name]
        if want is None or have is None:
            assert have is None and want is None, f"{name}: {have}, right is {want}"
        else:
            torch.testing.assert_close(have, want, msg=lambda text, name=name: f"{name}: {text}")
