"""Small modules put together from parts that have confused wrappers: described by data, built from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 3
ROWS_IN_TABLE = 7
DTYPES = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
LINEAR_KINDS = ("linear", "tied", "twice", "reentrant", "checkpointed")
KINDS = (*LINEAR_KINDS, "direct", "table", "sparse_table", "norm_eval", "norm_batch", "drift")
OUTPUTS = ("tensor", "tuple", "dict", "dataclass", "nested")


@dataclass(frozen=True)
class Layer:
    """One part of a model.

    Attributes:
        kind: one of ``KINDS``, or "gone" (left out by shrinking).
        dtype: key of ``DTYPES``.
        optional: whether a forward runs it only when it is named.
        frozen: whether it starts untrained.
        times: how often a "reentrant" or "checkpointed" block runs.
        tied_to: earlier layer whose weight a "tied" layer shares, if that one has a square weight.
        hooked: whether a hook of the user's doubles every gradient of its parameters.
    """

    kind: str
    dtype: str = "f64"
    optional: bool = False
    frozen: bool = False
    times: int = 1
    tied_to: int = 0
    hooked: bool = False


@dataclass(frozen=True)
class Model:
    """A stack of layers, a head behind them, and a second head for every output kind but "tensor"."""

    layers: tuple[Layer, ...]
    output: str = "tensor"

    def has(self, *kinds: str) -> bool:
        """Whether any layer is of one of these kinds."""
        return any(layer.kind in kinds for layer in self.layers)


class PlannedError(ValueError):
    """Raised in the middle of a backward because the program says so."""


@dataclass
class Trap:
    """The layer in front of which the next backward raises; None for none."""

    armed: int | None = None


class _Trapped(torch.autograd.Function):
    """Identity whose backward raises when the trap is armed for its place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trap: Trap, place: int) -> Tensor:
        ctx.trap, ctx.place = trap, place
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.trap.armed == ctx.place:
            raise PlannedError(f"in front of layer {ctx.place}")
        return gradient, None, None


@dataclass
class Outputs:
    """A user's own class of outputs."""

    main: Tensor
    second: Tensor
    note: str = "not a tensor"


class EvalNorm(nn.BatchNorm1d):
    """Batch norm that stays in evaluation mode, as in fine-tuning."""

    def train(self, mode: bool = True) -> EvalNorm:
        return super().train(False)


class Drift(nn.Module):
    """A buffer that every training forward moves by this rank's data, and that scales the result."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.rand(WIDTH, dtype=torch.float64))

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            self.level.add_(0.1 * h.detach().mean(0).tanh())
        return h * (1 + self.level.clone())


class Net(nn.Module):
    """The module that a ``Model`` describes; trunk in float64.

    Args:
        model: what to build.
        seed: of the initial values.
    """

    def __init__(self, model: Model, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = model
        self.trap = Trap()
        self.parts = nn.ModuleList(self._build(layer) for layer in model.layers)
        for index, layer in enumerate(model.layers):
            if layer.kind == "direct":
                scale = torch.rand(WIDTH, dtype=DTYPES[layer.dtype])
                self.register_parameter(f"direct{index}", nn.Parameter(scale))
            if layer.kind == "tied":
                self._tie(index, layer)
            if layer.frozen:
                self.set_trained(index, False)
        for index, layer in enumerate(model.layers):
            if layer.hooked:
                self._double_gradients(index)
        self.head = nn.Linear(WIDTH, 2, dtype=torch.float64)
        self.second_head = nn.Linear(WIDTH, 1, dtype=torch.float32) if model.output != "tensor" else None

    def forward(self, x: Tensor, use: tuple[int, ...]) -> Any:
        h = x
        for index, layer in enumerate(self.model.layers):
            if index in use or not layer.optional:
                h = self._run(index, layer, _Trapped.apply(h, self.trap, index))
        main = self.head(h)
        if self.second_head is None:
            return main
        second = self.second_head(h.float())
        return {
            "tuple": lambda: (main, second),
            "dict": lambda: {"main": main, "second": second},
            "dataclass": lambda: Outputs(main, second),
            "nested": lambda: [{"pair": (main, [second])}, "not a tensor"],
        }[self.model.output]()

    def trained_parameters(self, indices: tuple[int, ...]) -> list[nn.Parameter]:
        """Those of some layers and of the head."""
        found = [getattr(owner, name) for index in indices for owner, name in self.places(index)]
        return [p for p in (*found, *self.head.parameters()) if p.requires_grad]

    def places(self, index: int) -> list[tuple[nn.Module, str]]:
        """Where a layer's parameters are registered: (module, attribute)."""
        if self.model.layers[index].kind == "direct":
            return [(self, f"direct{index}")]
        part = self.parts[index]
        return [(part, name) for name, parameter in part._parameters.items() if parameter is not None]

    def set_trained(self, index: int, trained: bool) -> None:
        """Freeze or unfreeze a layer; its gradients go."""
        for owner, name in self.places(index):
            parameter = getattr(owner, name)
            parameter.requires_grad_(trained)
            parameter.grad = None

    def replace(self, index: int, seed: int) -> None:
        """Put new parameters, drawn from ``seed``, in place of a layer's."""
        generator = torch.Generator().manual_seed(seed)
        for owner, name in self.places(index):
            old = getattr(owner, name)
            values = torch.randn(old.shape, generator=generator, dtype=torch.float64).to(old.dtype)
            setattr(owner, name, nn.Parameter(values, requires_grad=old.requires_grad))
        if self.model.layers[index].hooked:
            self._double_gradients(index)

    def _double_gradients(self, index: int) -> None:
        for owner, name in self.places(index):
            parameter = getattr(owner, name)
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient * 2)

    def _build(self, layer: Layer) -> nn.Module:
        dtype = DTYPES[layer.dtype]
        if layer.kind in LINEAR_KINDS:
            return nn.Linear(WIDTH, WIDTH, dtype=dtype)
        if layer.kind in ("table", "sparse_table"):
            return nn.Embedding(ROWS_IN_TABLE, WIDTH, sparse=layer.kind == "sparse_table", dtype=dtype)
        if layer.kind == "norm_eval":
            norm = EvalNorm(WIDTH, dtype=torch.float64).eval()
            nn.init.uniform_(norm.running_mean)
            return norm
        if layer.kind == "norm_batch":
            return nn.BatchNorm1d(WIDTH, track_running_stats=False, dtype=torch.float64)
        return Drift() if layer.kind == "drift" else nn.Identity()

    def _tie(self, index: int, layer: Layer) -> None:
        if layer.tied_to >= index or self.model.layers[layer.tied_to].kind not in LINEAR_KINDS:
            return
        other = self.parts[layer.tied_to]
        if other.weight.dtype is self.parts[index].weight.dtype:
            self.parts[index].weight = other.weight

    def _run(self, index: int, layer: Layer, h: Tensor) -> Tensor:
        part = self.parts[index]
        if layer.kind == "direct":
            return h * (1 + getattr(self, f"direct{index}"))
        if layer.kind in ("table", "sparse_table"):
            rows = (h.detach() * 10).long().abs()[:, 0] % ROWS_IN_TABLE
            return h + part(rows)
        if layer.kind not in LINEAR_KINDS:
            return part(h)

        def block(h: Tensor) -> Tensor:
            return h + torch.tanh(part(_Trapped.apply(h, self.trap, index).to(part.weight.dtype)))

        for _ in range(2 if layer.kind == "twice" else layer.times):
            if layer.kind in ("reentrant", "checkpointed"):
                h = checkpoint(block, h, use_reentrant=layer.kind == "reentrant")
            else:
                h = block(h)
        return h


def losses(model: Model, output: Any) -> tuple[Tensor, Tensor]:
    """Loss of the first head, and of the second (zero where there is none)."""
    if model.output == "tensor":
        return output.square().mean(), output.new_zeros(())
    main, second = {
        "tuple": lambda: output,
        "dict": lambda: (output["main"], output["second"]),
        "dataclass": lambda: (output.main, output.second),
        "nested": lambda: (output[0]["pair"][0], output[0]["pair"][1][0]),
    }[model.output]()
    return main.square().mean(), second.sin().mean()
