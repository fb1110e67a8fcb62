"""The store that all ranks of the job share, in whatever groups they are."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store


def store_of_job() -> dist.Store:
    """The store of the default group; there is no other group without one."""
    job = dist.group.WORLD
    assert job is not None
    return dist.PrefixStore("paceline/job", _get_process_group_store(job))
