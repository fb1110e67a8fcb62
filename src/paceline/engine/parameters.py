"""Which parameters are trained, and noticing when that changes after wrapping.

Layers are frozen, unfrozen, re-initialised or replaced while training goes on; gradients
of whatever is trained *now* must be averaged.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from paceline.comm.interpreted import interpreted
from paceline.engine.plan import ParameterSpec

_TRAINED = operator.attrgetter("requires_grad")
_TRAITS = (_TRAINED, operator.attrgetter("dtype"), operator.attrgetter("shape"))
_SPARSE_LAYERS = (nn.Embedding, nn.EmbeddingBag)


@interpreted
class TrainedParameters:
    """The parameters of a module that require gradients, without duplicates.

    Args:
        module: the wrapped module.
        ignored: dotted names (of parameters) that are left alone.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str]) -> None:
        self._module = module
        self._ignored = ignored
        self.named: list[tuple[str, nn.Parameter]] = []
        self.specs: list[ParameterSpec] = []
        self.newcomers: list[nn.Parameter] = []  # whose values other ranks have not been given yet
        self._seen: WeakIdKeyDictionary | None = None
        self._registries: list[Callable[[], Iterable[Any]]] = []  # what modules hold: children and parameters
        self._registered: list[object] = []
        self._watched: list[nn.Parameter] = []
        self._traits: list[list[Any]] = []  # by trait, then by parameter
        self.scan()

    def scan(self) -> None:
        """Read the module again."""
        sparse = {id(p) for layer in self._module.modules() for p in _sparse_parameters(layer)}
        self.named = [(name, p) for name, p in self._all_named() if p.requires_grad]
        self.specs = [spec_of(name, p, id(p) in sparse) for name, p in self.named]
        self._registries = [
            registry.values
            for layer in self._module.modules()
            for registry in (layer._modules, layer._parameters)  # dicts, or torch.jit's own likes of them
        ]
        self._registered = self._now_registered()
        self._watched = [p for _, p in self._all_named()]
        self._traits = self._current_traits()
        self._note_newcomers()

    def changed(self) -> bool:
        """Whether a parameter was replaced, added, removed, (un)frozen, converted or resized since ``scan``.

        What stands in parameters' places for a while does not count, see ``lent``. Runs in every step,
        so it only compares identities and three attributes.
        """
        return self.replaced_or_frozen() or self._current_traits() != self._traits

    def replaced_or_frozen(self) -> bool:
        """The same without conversions and sizes: what can change between a forward and its backward."""
        now = self._now_registered()
        if not self._as_scanned(now):
            return not _some_lent(now)
        return list(map(_TRAINED, self._watched)) != self._traits[0]

    def lent(self) -> bool:
        """Whether tensors that are no parameters stand in the places of some at the moment.

        ``torch.func.functional_call`` puts them there for one call: weights that were computed (MAML),
        or that a transformation of functions traces (per-sample gradients).
        """
        now = self._now_registered()
        return not self._as_scanned(now) and _some_lent(now)

    def _as_scanned(self, now: list[object]) -> bool:
        return len(now) == len(self._registered) and all(map(operator.is_, now, self._registered))

    def _note_newcomers(self) -> None:
        """Parameters that ``scan`` finds for the first time, but for those of the first scan."""
        if self._seen is None:
            self._seen = WeakIdKeyDictionary()
        else:
            self.newcomers += [p for p in self._watched if p not in self._seen]
        self._seen.update(dict.fromkeys(self._watched, True))

    def _now_registered(self) -> list[object]:
        return list(itertools.chain.from_iterable(map(operator.call, self._registries)))

    def _all_named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self._module.named_parameters() if name not in self._ignored)

    def _current_traits(self) -> list[list[Any]]:
        return [list(map(trait, self._watched)) for trait in _TRAITS]


def spec_of(name: str, parameter: Tensor, sparse: bool = False) -> ParameterSpec:
    """What the plan has to know of ``parameter``."""
    return ParameterSpec(
        name=name,
        shape=tuple(parameter.shape),
        element_size=gradient_dtype(parameter).itemsize,
        kind=(gradient_dtype(parameter), parameter.device),
        sparse=sparse,
    )


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of the parameter's ``.grad``: its own, unless ``grad_dtype`` was set to another one."""
    return parameter.grad_dtype or parameter.dtype


def _some_lent(registered: list[object]) -> bool:
    return any(isinstance(value, Tensor) and not isinstance(value, nn.Parameter) for value in registered)


def _sparse_parameters(layer: nn.Module) -> list[nn.Parameter]:
    return list(layer.parameters()) if isinstance(layer, _SPARSE_LAYERS) and layer.sparse else []
