"""The process group of a collective is read from the frame that called it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from paceline.recorder.groups import collective_group

CALLS = """
def all_reduce(tensor, group=None):
    return inner()
def inner():
    return look()
def new_group(ranks):
    return look()
"""


@pytest.fixture
def calls() -> Iterator[dict[str, Any]]:
    """Functions that seem to be torch.distributed's and look where they stand, in a job of one rank."""
    found: dict[str, Any] = {"look": lambda: collective_group(sys._getframe())}
    exec(compile(CALLS, "/lib/torch/distributed/distributed_c10d.py", "exec"), found)
    store, timeout = dist.HashStore(), timedelta(seconds=7)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
    yield found
    dist.destroy_process_group()


def test_the_group_and_the_default_groups_timeout_are_told(calls: dict[str, Any]) -> None:
    group = dist.new_group(timeout=timedelta(seconds=99))
    assert isinstance(group, dist.ProcessGroup)
    default = {"group": "0", "members": [0], "patience": 7.0}
    assert calls["all_reduce"](1) == default
    assert calls["all_reduce"](1, group=dist.group.WORLD) == default
    assert calls["all_reduce"](1, group) == {**default, "group": group.group_name}
    assert group.group_name != "0"


def test_elsewhere_there_is_none(calls: dict[str, Any]) -> None:
    assert collective_group(sys._getframe()) == collective_group(None) == {}
    assert calls["new_group"]([0]) == {}
    assert calls["all_reduce"](1, group="no group") == {}


def test_of_a_large_group_the_ranks_are_not_told(
    calls: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.distributed_c10d.get_process_group_ranks", lambda _: range(1000))
    assert calls["all_reduce"](1)["members"] == []
