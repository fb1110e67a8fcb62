"""Random numbers as a function of (seed, step, rank), and of nothing else.

Every step starts its generators afresh from a seed derived from these three, so a
resumed run draws what the uninterrupted one would have drawn, no matter what was drawn
in between, and no generator state needs to be kept in a checkpoint.
"""

from __future__ import annotations

import hashlib
import random
import sys

import torch


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
