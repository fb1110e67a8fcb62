"""What one micro-batch's loss is multiplied by before its backward; the head of losses.py says why.

An overridden compute_loss is given the items of the step, and may or may not use them: only its
code knows whether it returns a mean over its own items or a sum divided by the step's. So it
gets a count that notices whether anything was computed with it (`NoticedCount`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class NoticedCount(Tensor):
    """A scalar tensor that remembers whether anything was computed with it.

    Attributes:
        used: whether it was. Asking for its shape, dtype or device does not count.
    """

    used: bool

    @staticmethod
    def of(value: int | Tensor, device: torch.device) -> NoticedCount:
        """A count of this value, int64, on `device`."""
        counted = torch.as_tensor(value, device=device).clone().as_subclass(NoticedCount)
        counted.used = False
        return counted

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") != "__get__":
            for each in (*args, *(kwargs or {}).values()):
                if isinstance(each, NoticedCount):
                    each.used = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@dataclass
class Weighing:
    """One micro-batch among all of its step.

    Attributes:
        own: items of this rank's part.
        total: items of the step, over all ranks and micro-batches.
        samples: samples of this rank's part that count.
        world_size: ranks.
        takes_total: whether the loss is divided by `total`; None: see whether compute_loss uses `count`.
        count: what compute_loss gets as num_items_in_batch.
        times_ranks: compute_loss has asked for the number of ranks: it multiplies by it itself, as Hugging
            Face's own compute_loss does.
    """

    own: int | Tensor
    total: int | Tensor
    samples: int
    world_size: int
    takes_total: bool | None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    times_ranks: bool = False

    def __post_init__(self) -> None:
        self.count: int | Tensor | None = self.total if self.takes_total else None
        if self.takes_total is None:
            self.count = NoticedCount.of(self.total, self.device)

    def note_ranks_were_asked_for(self) -> None:
        """Called whenever the user's code reads the number of ranks."""
        self.times_ranks = self.takes_total is None

    def factor(self) -> float | Tensor:
        """What to multiply the loss by, once compute_loss has returned it."""
        if self.takes_total:
            return float(self.world_size if self.samples else 0)
        if not int(self.own):
            return 0.0  # labels that do not count may have been replaced, so whatever the loss is, it is not
        if isinstance(self.count, NoticedCount) and self.count.used:
            return 1.0 if self.times_ranks else float(self.world_size)
        return int(self.own) * self.world_size / self.total


def weighted(loss: Tensor, factor: float | Tensor) -> Tensor:
    """The loss times its factor, in the loss's dtype; the loss itself where that changes nothing."""
    if isinstance(factor, Tensor):
        return loss * factor.to(loss.device, loss.dtype)
    return loss if factor == 1.0 else loss * factor


def alone(world_size: int = 1) -> Weighing:
    """The weighing of a batch that is a whole step by itself."""
    return Weighing(own=1, total=1, samples=1, world_size=world_size, takes_total=False)
