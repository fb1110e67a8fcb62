"""Random numbers as a function of (seed, step, rank), and of nothing else.

Every step starts its generators afresh from a seed derived from these three, so a
resumed run draws what the uninterrupted one would have drawn, no matter what was drawn
in between, and no generator state needs to be kept in a checkpoint.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.environment import set_variables


def derive_seed(*parts: int | str) -> int:
    """A seed of 63 bits that depends on every part and on their order (SHA-256)."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy (if it is in use) and torch, on all devices."""
    _seed_libraries(seed)
    torch.manual_seed(seed)


def seed_again(seed: int) -> None:
    """The same for many times a second.

    ``torch.manual_seed`` also queues a call, with a formatted stack, for every kind of device
    that is not in use; that takes longer than a small step.
    """
    _seed_libraries(seed)
    torch.default_generator.manual_seed(seed)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        if getattr(module, "is_initialized", lambda: True)():
            getattr(module, "manual_seed_all", module.manual_seed)(seed)


def _seed_libraries(seed: int) -> None:
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


class OwnGenerators:
    """The CPU's generators as one source of samples sees them, apart from everyone else's.

    A stream that shuffles or augments draws from them wherever and whenever it is read: the same
    numbers on every rank and in every worker.

    Args:
        seed: what they start from.

    Attributes:
        states: of the generators after the last block; None before the first. They can be saved.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.states: tuple[Any, ...] | None = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A block that draws from these generators; the outer ones are as before afterwards."""
        outside = _states()
        if self.states is None:
            _seed_libraries(self._seed)
            torch.default_generator.manual_seed(self._seed)
        else:
            _restore(self.states)
        try:
            yield
        finally:
            self.states = _states()
            _restore(outside)


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """A block that draws from CPU generators seeded with `seed`; the outer ones are as before afterwards."""
    with OwnGenerators(seed).in_place():
        yield


def be_deterministic() -> None:
    """Let torch use deterministic kernels only, on this process; an operation that has none raises."""
    set_variables({"CUBLAS_WORKSPACE_CONFIG": ":16:8"})
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def _states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return (
        random.getstate(),
        torch.default_generator.get_state(),
        _numpy_state(numpy) if numpy is not None else None,
    )


def _numpy_state(numpy: Any) -> tuple[Any, ...]:
    """The state with its words as a tensor, which ``torch.load`` reads back without further ado."""
    kind, words, *rest = numpy.random.get_state()
    return (kind, torch.from_numpy(words.astype("int64")), *rest)


def _restore(states: tuple[Any, ...]) -> None:
    of_python, of_torch, of_numpy = states
    random.setstate(of_python)
    torch.default_generator.set_state(of_torch)
    if of_numpy is not None:
        kind, words, *rest = of_numpy
        sys.modules["numpy"].random.set_state((kind, words.numpy().astype("uint32"), *rest))
