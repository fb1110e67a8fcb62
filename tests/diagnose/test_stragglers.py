"""A slow rank is told while the run goes on, and a run in order is left in peace."""

from __future__ import annotations

from paceline.diagnose.stragglers import QUIET_S, STRETCH_S, StragglerWatch
from paceline.recorder.reading import RankState

LOADS = {"line": "train.py:41 in load", "doing": "data loading", "stands": True}


def run(watch: StragglerWatch, shares: list[float], until: float, start: float = 0.0) -> list[str]:
    """Looks every 2 s at ranks that wait these shares of the time, and load data otherwise."""
    told, now = [], start
    while now <= until:
        states = {
            rank: RankState(rank, read_at=now, waited_s=share * now, passes=int(10 + now), **LOADS)
            for rank, share in enumerate(shares)
        }
        line = watch.look(states, now)
        told += [line] if line else []
        now += 2.0
    return told


def test_the_rank_that_others_wait_for_is_named_with_its_share_and_its_line() -> None:
    told = run(StragglerWatch(), [0.5, 0.6, 0.02], STRETCH_S + 1)
    assert told == [
        "rank 2 is slower than the others, who waited for it 48% of the time over the last 20 s (20 steps). "
        "It was 100% of its time in data loading, at train.py:41 in load"
    ]


def test_at_most_one_line_a_minute() -> None:
    watch = StragglerWatch()
    assert len(run(watch, [0.5, 0.0], QUIET_S)) == 1
    assert len(run(watch, [0.5, 0.0], 2 * QUIET_S + 2, start=QUIET_S + 2)) == 1


def test_ranks_that_wait_alike_are_no_news() -> None:
    assert run(StragglerWatch(), [0.5, 0.5, 0.45], 5 * STRETCH_S) == []
    assert run(StragglerWatch(), [0.0, 0.0], 5 * STRETCH_S) == []
    assert run(StragglerWatch(), [0.9], 5 * STRETCH_S) == []
    assert run(StragglerWatch(), [], 5 * STRETCH_S) == []


def test_one_rank_that_waits_more_than_the_rest_is_no_straggler() -> None:
    assert run(StragglerWatch(), [0.6, 0.0, 0.0], 5 * STRETCH_S) == []


def test_the_first_passes_do_not_count() -> None:
    watch, now = StragglerWatch(), 0.0
    while now < 3 * STRETCH_S:
        waited = {0: now, 1: 0.0}
        states = {r: RankState(r, read_at=now, waited_s=seconds, passes=2) for r, seconds in waited.items()}
        assert watch.look(states, now) is None
        now += 2.0


def test_a_hang_is_told_with_where_the_missing_rank_stands() -> None:
    watch, told = StragglerWatch(), []
    waits = {"waits_for": "backward pass 7, all-reduce of bucket 1 of 1 (w)", "waits_since": 0.0}
    for now in range(0, 60, 2):
        missing = RankState(1, passes=6, seen=now, line_since=0.0, asleep=True, **LOADS)
        told.append(watch.look({0: RankState(0, passes=7, **waits), 1: missing}, float(now)))
    lines = [line for line in told if line]
    assert len(lines) == 1
    assert "rank 1" in lines[0] and "backward pass 7" in lines[0] and "train.py:41" in lines[0]


def test_a_deadlock_of_all_is_told() -> None:
    watch, told = StragglerWatch(), []
    calls = [f"collective 1 (all_reduce in process group {number})" for number in range(2)]
    states = {rank: RankState(rank, passes=7, waits_for=call) for rank, call in enumerate(calls)}
    for now in range(0, 60, 2):
        line = watch.look(states, float(now))
        told += [(now, line)] if line else []
    [(when, line)] = told
    assert when == 10
    assert line.startswith("the ranks wait for different things, so nobody gets on. Rank 0 had waited 10 s")


def test_ranks_in_calls_of_different_groups_are_told_when_that_will_end() -> None:
    calls = [f"a collective (all_reduce) at train.py:{line}" for line in (9, 11)]
    states = {rank: RankState(rank, waits_for=call) for rank, call in enumerate(calls)}
    line = StragglerWatch().look(states, 31.0)
    assert line is not None and calls[0] in line and calls[1] in line
    assert "new_group(timeout=...)" in line
    recorded = {rank: RankState(rank, waits_for=f"bucket {rank}") for rank in range(2)}
    line = StragglerWatch().look(recorded, 31.0)
    assert line is not None and "new_group" not in line


def test_what_one_rank_prepares_for_all_may_take_longer() -> None:
    watch, told = StragglerWatch(), []
    for now in range(0, 60, 2):
        missing = RankState(0, seen=now, line_since=0.0, **LOADS)
        waits = {"waits_for": "a collective (barrier) at train.py:9", "waits_since": 0.0}
        line = watch.look({0: missing, 1: RankState(1, **waits)}, float(now))
        told += [(now, line)] if line else []
    [(when, line)] = told
    assert when == 30 and "rank 0 has kept the others waiting for 30 s, for a collective (barrier)" in line
