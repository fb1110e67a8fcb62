"""What all tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Many small processes share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# On a busy machine an example takes as long as it takes.
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ddp",
        default="paceline.engine.ddp:DistributedDataParallel",
        metavar="MODULE:CLASS",
        help="the wrapper that tests/oracle holds against torch's DDP and against one process",
    )
    parser.addoption(
        "--backend",
        default="gloo",
        help="process group backend for the ranks of tests/oracle (default: gloo)",
    )


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """A default process group that a test brings up in this process ends with the test."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
