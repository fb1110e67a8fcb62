"""Where a rank stands, said in the words that Hugging Face's and Accelerate's users know."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from paceline.environment import rank_place


class ParallelMode(Enum):
    """How a run is spread; equal to Hugging Face's members of the same value."""

    NOT_PARALLEL = "not_parallel"
    DISTRIBUTED = "distributed"

    def __eq__(self, other: Any) -> bool:
        return bool(self.value == getattr(other, "value", other))

    def __hash__(self) -> int:
        return hash(self.value)


@dataclass(frozen=True)
class DistributedState:
    """This rank among all, under the names of Accelerate's PartialState.

    Attributes:
        device: what this rank computes on.
    """

    device: torch.device

    @property
    def distributed_type(self) -> str:
        """As in Accelerate: NO, MULTI_CPU, MULTI_GPU, MULTI_XPU ..."""
        if self.num_processes == 1:
            return "NO"
        return "MULTI_GPU" if self.device.type == "cuda" else f"MULTI_{self.device.type.upper()}"

    @property
    def num_processes(self) -> int:
        """Number of ranks."""
        return dist.get_world_size()

    @property
    def process_index(self) -> int:
        """This rank."""
        return dist.get_rank()

    @property
    def local_process_index(self) -> int:
        """This rank's number on its machine."""
        return rank_place().local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there are several ranks."""
        return self.num_processes > 1

    def wait_for_everyone(self) -> None:
        """A barrier."""
        dist.barrier()
