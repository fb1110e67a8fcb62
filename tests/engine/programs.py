"""Random step programs: what a script does between forwards and backwards, as data.

A program is the same on all ranks, except where a statement says which ranks it concerns. Any sequence of
statements is a program: the interpreter passes over what makes no sense at its point (a backward whose graph
is gone), so that statements can be dropped one by one to find out which of them matter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from tests.engine.random_models import DTYPES, KINDS, LINEAR_KINDS, OUTPUTS, Layer, Model


@dataclass(frozen=True)
class Options:
    """Constructor arguments, and whether a communication hook that averages is registered."""

    find_unused_parameters: bool = True
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    bucket_cap_mb: float | None = None
    broadcast_buffers: bool = True
    skip_all_reduce_unused_params: bool = False
    hook: bool = False


@dataclass(frozen=True)
class Forward:
    """Run the wrapper (or its module) on each rank's data and keep the outputs under ``key``.

    Attributes:
        use: per rank, the optional layers that take part.
        penalty: whether the loss contains a gradient of the output by the input.
    """

    key: int
    use: tuple[tuple[int, ...], ...]
    seed: int
    through_module: bool = False
    no_sync: bool = False
    penalty: bool = False


@dataclass(frozen=True)
class Backward:
    """Backward of the sum of the losses under ``keys``; on ``failing`` ranks it raises at layer ``fail_at``.

    With ``only``, per rank, it is asked for the gradients of some layers and the head alone (``inputs=``).
    A program that catches the exception calls zero_grad() on all ranks.
    """

    keys: tuple[int, ...]
    both_heads: bool = True
    no_sync: bool = False
    retain: bool = False
    failing: tuple[int, ...] = ()
    fail_at: int = 0
    only: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class ZeroGrad:
    """zero_grad of the wrapper."""

    set_to_none: bool = True


@dataclass(frozen=True)
class Keep:
    """Keep all gradients, then zero_grad(): what is kept must stay as it is (without bucket views)."""


@dataclass(frozen=True)
class SetTrained:
    """Freeze or unfreeze a layer and drop its gradients."""

    layer: int
    trained: bool


@dataclass(frozen=True)
class Replace:
    """Put new parameters in place of a layer's, the same on all ranks."""

    layer: int
    seed: int


@dataclass(frozen=True)
class Grad:
    """torch.autograd.grad by parameters and by input, through the module, on some ranks."""

    ranks: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Evaluate:
    """A forward of the wrapper in evaluation mode under no_grad, on some ranks."""

    ranks: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Step:
    """Gradient descent by hand, where gradients are averages."""


Statement = Forward | Backward | ZeroGrad | Keep | SetTrained | Replace | Grad | Evaluate | Step


@dataclass(frozen=True)
class Program:
    """A model, a wrapper around it, and what is done with them."""

    world: int
    seed: int
    options: Options
    model: Model
    statements: tuple[Statement, ...]

    def __str__(self) -> str:
        lines = [f"Program({self.world}, {self.seed}, {self.options},", f"  {self.model}, ("]
        return "\n".join([*lines, *[f"    {statement}," for statement in self.statements], "  ))"])


# -- drawing -----------------------------------------------------------------------------------


def draw_program(random: Random) -> Program:
    """A random program; any source with the methods of ``random.Random`` will do."""
    world = random.choice([2] * 8 + [3, 4])
    options = _draw_options(random)
    model = _draw_model(random)
    drawing = _Drawing(random, world, options, model)
    return Program(world, random.randrange(10_000), options, model, tuple(drawing.statements()))


def _draw_options(random: Random) -> Options:
    static_graph = random.random() < 0.12
    find_unused_parameters = random.random() < 0.7
    return Options(
        find_unused_parameters=find_unused_parameters,
        static_graph=static_graph,
        gradient_as_bucket_view=random.random() < 0.4,
        bucket_cap_mb=random.choice([1e-6, 1e-6, 1e-4, 1e-4, None, 25.0]),
        broadcast_buffers=random.random() < 0.7,
        skip_all_reduce_unused_params=find_unused_parameters and random.random() < 0.15,
        hook=random.random() < 0.1,
    )


def _draw_model(random: Random) -> Model:
    layers = []
    for index in range(random.randint(1, 5)):
        kind = random.choice([*KINDS, *LINEAR_KINDS])
        layers.append(
            Layer(
                kind=kind,
                dtype=random.choice(["f64", "f64", *DTYPES]),
                optional=random.random() < 0.35,
                frozen=random.random() < 0.12,
                times=random.choice([1, 1, 2, 3]) if kind in ("reentrant", "checkpointed") else 1,
                tied_to=random.randrange(index) if kind == "tied" and index else 0,
                hooked=random.random() < 0.1,
            )
        )
    return Model(tuple(layers), random.choice(OUTPUTS))


class _Drawing:
    def __init__(self, random: Random, world: int, options: Options, model: Model) -> None:
        self.random, self.world, self.options, self.model = random, world, options, model
        self.keys = 0
        self.alive: list[int] = []
        self.optional = [index for index, layer in enumerate(model.layers) if layer.optional]
        self.all_used = not options.find_unused_parameters and random.random() < 0.75
        self.steady_use = self._draw_use()

    def statements(self) -> list[Statement]:
        if self.options.static_graph:
            return [s for _ in range(self.random.randint(2, 6)) for s in self._draw_static_step()]
        drawn: list[Statement] = []
        for _ in range(self.random.randint(3, 16)):
            drawn += self._draw_next()
        return drawn

    def _draw_static_step(self) -> list[Statement]:
        self.keys += 1
        no_sync = self.random.random() < 0.3
        forward = Forward(self.keys, self.steady_use, self._seed(), no_sync=no_sync)
        backward = Backward((self.keys,), no_sync=no_sync)
        if self.random.random() < 0.1:
            backward = self._failing(backward)
        around: list[Statement] = [ZeroGrad(self.random.random() < 0.5)] if self.random.random() < 0.6 else []
        after: list[Statement] = [Step()] if self.random.random() < 0.4 else []
        return [*around, forward, backward, *after]

    def _draw_next(self) -> list[Statement]:
        random = self.random
        roll = random.random()
        if roll < 0.28:
            return [self._draw_forward()]
        if roll < 0.58:
            return [self._draw_backward()] if self.alive else [self._draw_forward(), self._draw_backward()]
        if roll < 0.72:
            return [ZeroGrad(random.random() < 0.5)]
        if roll < 0.76:
            return [Keep()]
        if roll < 0.82:
            return [SetTrained(random.randrange(len(self.model.layers)), random.random() < 0.6)]
        if roll < 0.86:
            return [Replace(random.randrange(len(self.model.layers)), self._seed())]
        if roll < 0.90:
            return [Grad(self._some_ranks(), self._seed())]
        if roll < 0.94:
            return [Evaluate(self._some_ranks(), self._seed())]
        return [Step()]

    def _draw_forward(self) -> Forward:
        self.keys += 1
        self.alive.append(self.keys)
        random = self.random
        return Forward(
            self.keys,
            self._draw_use(),
            self._seed(),
            through_module=random.random() < 0.25,
            no_sync=random.random() < 0.25,
            penalty=random.random() < 0.08,
        )

    def _draw_backward(self) -> Backward:
        random = self.random
        keys = [random.choice(self.alive)]
        if len(self.alive) > 1 and random.random() < 0.25:
            keys = sorted(random.sample(self.alive, 2))
        retain = random.random() < 0.2
        if not retain:
            self.alive = [key for key in self.alive if key not in keys]
        backward = Backward(
            tuple(keys),
            both_heads=self.all_used or random.random() < 0.8,
            no_sync=random.random() < 0.25,
            retain=retain,
            only=self._draw_layers() if random.random() < 0.08 and not self.model.has("reentrant") else None,
        )
        return self._failing(backward) if random.random() < 0.1 else backward

    def _draw_layers(self) -> tuple[tuple[int, ...], ...]:
        layers = range(len(self.model.layers))
        return tuple(
            tuple(index for index in layers if self.random.random() < 0.5) for _ in range(self.world)
        )

    def _failing(self, backward: Backward) -> Backward:
        place = self.random.randrange(len(self.model.layers))
        return replace(backward, failing=self._some_ranks(), fail_at=place)

    def _draw_use(self) -> tuple[tuple[int, ...], ...]:
        if self.all_used:
            return (tuple(self.optional),) * self.world
        random = self.random
        alike = random.random() < 0.3
        drawn = [tuple(i for i in self.optional if random.random() < 0.6) for _ in range(self.world)]
        return tuple(drawn[:1] * self.world if alike else drawn)

    def _some_ranks(self) -> tuple[int, ...]:
        if self.random.random() < 0.25:
            return tuple(range(self.world))
        return (self.random.randrange(self.world),)

    def _seed(self) -> int:
        return self.random.randrange(10_000)


# -- making smaller ------------------------------------------------------------------------------

_PLAIN_VALUES = {"no_sync": False, "through_module": False, "penalty": False, "retain": False, "only": None}


def simpler_programs(program: Program) -> list[Program]:
    """Programs with one thing less, the largest savings first."""
    found = [
        replace(program, statements=program.statements[:i] + program.statements[i + 1 :])
        for i in reversed(range(len(program.statements)))
    ]
    if program.world > 2:
        found.append(replace(program, world=2))
    layers = program.model.layers
    for index, layer in enumerate(layers):
        others = [Layer("gone"), Layer("linear", optional=layer.optional, frozen=layer.frozen)]
        for other in others if layer.kind not in ("gone", "linear") else others[: layer.kind == "linear"]:
            changed = (*layers[:index], other, *layers[index + 1 :])
            found.append(replace(program, model=replace(program.model, layers=changed)))
    plain = Options(static_graph=program.options.static_graph)
    for name, value in vars(plain).items():
        if getattr(program.options, name) != value:
            found.append(replace(program, options=replace(program.options, **{name: value})))
    if program.model.output != "tensor":
        found.append(replace(program, model=replace(program.model, output="tensor")))
    for index, statement in enumerate(program.statements):
        for name, plain_value in _PLAIN_VALUES.items():
            if getattr(statement, name, plain_value) != plain_value:
                plainer = replace(statement, **{name: plain_value})
                changed_to = (*program.statements[:index], plainer, *program.statements[index + 1 :])
                found.append(replace(program, statements=changed_to))
    return found
