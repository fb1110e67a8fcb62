"""Ranks that wait for each other in the collectives of different process groups.

PyTorch ends that at the timeout of the groups, and those that ``new_group`` makes have 30 minutes, whatever
``init_process_group`` was given. Nobody can get on where the main thread of every rank stands still in a
collective of a group some member of which stands still in one of another group.

Note: what standing still is
    A thread that uses no processor time at all between looks has not run one instruction, so it is in the
    same call. A loop that comes by the same line again and again uses some.

Pure: nothing here looks at a process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from paceline.recorder.places import COLLECTIVE
from paceline.recorder.reading import RankState

_FRESH_S = 5.0  # seconds without a sign of life from which on it is not known where a rank stands


def wait_for_each_other(states: Collection[RankState], now: float) -> bool:
    """Whether no rank can get on.

    Args:
        states: of all ranks of the job, on one clock.
        now: what that clock shows.
    """
    by_rank = {state.rank: state for state in states}
    return len(by_rank) > 1 and all(_is_blocked(state, by_rank, now) for state in states)


def deadlocked(states: Collection[RankState], now: float) -> bool:
    """Whether no rank could get on for longer than the timeout of the job's default process group."""
    overdue = all(0.0 < state.patience < now - state.still_since for state in states)
    return overdue and wait_for_each_other(states, now)


def _is_blocked(state: RankState, by_rank: Mapping[int, RankState], now: float) -> bool:
    """Whether a rank stands in a collective, for which one is missing that stands in another group's."""
    stands = state.waits_for.startswith(COLLECTIVE) and state.stands and now - state.seen < _FRESH_S
    others = [by_rank[member] for member in state.members if member in by_rank]
    return stands and bool(state.group) and any(other.group != state.group for other in others)
