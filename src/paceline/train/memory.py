"""Memory that a stage of the Trainer's work takes, for its metrics (``skip_memory_metrics=False``).

    init_mem_cpu_alloc_delta       what is held more at the end of the stage than at its beginning, in bytes
    init_mem_cpu_peaked_delta      how much more than at the end it was in between
    before_init_mem_cpu            what was held before the Trainer was made

The same for train, eval and test, and with ``gpu`` for the accelerator. Numbers of the constructor go
with the first stage that is logged. Names and meanings are Hugging Face's.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_LOOK_EVERY = 0.005  # seconds between two looks at the process's size


@dataclass(frozen=True)
class Usage:
    """Bytes of one kind of memory: at a stage's beginning, at its end, and at most in between."""

    began: int
    ended: int
    peak: int


class MemoryMeter:
    """Measures one stage at a time; one that begins inside another is part of it.

    Args:
        wanted: without it, nothing is measured, and `stop` gives nothing.
        device: this rank's.
    """

    def __init__(self, wanted: bool, device: torch.device) -> None:
        self._wanted, self._device = wanted, device
        self._stage = ""
        self._kept: dict[str, int] = {}
        self._ends = threading.Event()
        self._process: Any = importlib.import_module("psutil").Process() if wanted else None

    def start(self, stage: str) -> None:
        """A stage begins: init, train, eval or test."""
        if not self._wanted or self._stage:
            return
        self._stage, self._ends = stage, threading.Event()
        self._began = self._peak = self._process_size()
        self._began_on_device = self._device_size(reset_peak=True)
        self._watcher = threading.Thread(target=self._watch, name="paceline-memory", daemon=True)
        self._watcher.start()

    def stop(self, stage: str) -> dict[str, int]:
        """The stage ends; returns its metrics, or nothing if it is part of another."""
        if self._stage != stage or not self._wanted:
            return {}
        self._ends.set()
        self._watcher.join()
        self._stage = ""
        used = {"cpu": Usage(self._began, self._process_size(), self._peak)}
        if self._device.type != "cpu":
            peak = torch.accelerator.memory.max_memory_allocated(self._device)
            used["gpu"] = Usage(self._began_on_device, self._device_size(), peak)
        found = self._kept | _metrics(stage, used)
        self._kept = found if stage == "init" else {}
        return found

    @contextmanager
    def stage(self, stage: str) -> Iterator[dict[str, int]]:
        """A block that is a stage; what it gives holds the metrics once the block is through."""
        found: dict[str, int] = {}
        self.start(stage)
        try:
            yield found
        finally:
            found.update(self.stop(stage))

    def _watch(self) -> None:
        while not self._ends.wait(_LOOK_EVERY):
            self._peak = max(self._peak, self._process_size())

    def _process_size(self) -> int:
        return int(self._process.memory_info().rss)

    def _device_size(self, reset_peak: bool = False) -> int:
        if self._device.type == "cpu":
            return 0
        if reset_peak:
            torch.accelerator.memory.reset_peak_memory_stats(self._device)
        return int(torch.accelerator.memory.memory_allocated(self._device))


def _metrics(stage: str, used: dict[str, Usage]) -> dict[str, int]:
    found = {}
    for kind, usage in used.items():
        found[f"{stage}_mem_{kind}_alloc_delta"] = usage.ended - usage.began
        found[f"{stage}_mem_{kind}_peaked_delta"] = max(0, usage.peak - usage.ended)
        if stage == "init":
            found[f"before_init_mem_{kind}"] = usage.began
    return found
