"""Ranks that wait for each other in different process groups are told from all others that wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.diagnose.deadlock import deadlocked
from paceline.diagnose.stragglers import StragglerWatch
from paceline.recorder.reading import RankState

NOW = 100.0


def standing(rank: int, group: str, *members: int, **more: Any) -> RankState:
    words = f"a collective (all_reduce) in process group {group} at train.py:{rank}"
    fields = {
        "seen": NOW - 1,
        "waits_since": 80.0,
        "still_since": 80.0,
        "stands": True,
        "patience": 8.0,
        **more,
    }
    return RankState(rank, waits_for=words, group=group, members=members, **fields)


CROSSED = [standing(0, "1", 0, 1), standing(1, "2", 0, 1)]


def test_two_ranks_in_two_groups() -> None:
    assert deadlocked(CROSSED, NOW)
    assert not deadlocked([replace(state, patience=30.0) for state in CROSSED], NOW)
    assert deadlocked([replace(state, patience=30.0) for state in CROSSED], NOW + 11) is False  # not heard of
    in_a_circle = [standing(rank, f"{rank}", rank, (rank + 1) % 3) for rank in range(3)]
    assert deadlocked(in_a_circle, NOW)


@pytest.mark.parametrize(
    "change",
    [
        {"waits_for": ""},  # it is elsewhere, and may come
        {"waits_for": "backward pass 7, all-reduce of bucket 1 of 1 (w)"},  # the engine ends it itself
        {"still_since": NOW - 1},  # it is getting on
        {"stands": False},
        {"seen": NOW - 10},  # stopped, perhaps
        {"patience": 0.0},  # not known
        {"group": "1"},  # both in one: the network, or other arguments
        {"members": (1,)},
        {"members": ()},  # many, or not known
    ],
)
def test_what_is_not_certain_is_left_alone(change: dict[str, Any]) -> None:
    assert not deadlocked([CROSSED[0], replace(CROSSED[1], **change)], NOW)
    assert not deadlocked(CROSSED[:1], NOW)


def test_while_it_lasts_its_end_is_told() -> None:
    states = {state.rank: replace(state, patience=60.0) for state in CROSSED}
    line = StragglerWatch().look(states, NOW)
    assert line is None  # others may still be getting ready
    late = {rank: replace(state, waits_since=60.0) for rank, state in states.items()}
    line = StragglerWatch().look(late, NOW)
    assert line is not None
    assert line.endswith("They are ended after 60 s, the timeout of init_process_group; or by Ctrl-C.")
    assert "Rank 1 had waited 40 s for a collective (all_reduce) in process group 2 at train.py:1." in line
