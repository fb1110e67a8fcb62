"""Which rank held up the others, found by holding the ranks' records against each other.

    all but some wait               -> those some are elsewhere: loading data, asleep, stuck
    all wait, for different things  -> out of step
    all wait for the same           -> who came last, after the others had given up; where nobody did, the
                                       call they are all in was not the same after all

Pure: nothing here looks at a process, so that every story can be told to it in a test.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.recorder.places import COLLECTIVE
from paceline.recorder.reading import RankState
from paceline.recorder.words import ranks, seconds, waits, whereabouts

_LATE_S = 1.0  # seconds by which a rank must come after the others to be what they waited for
_SHOWN = 4  # ranks whose whereabouts are told, of many
_SETTLED_S = 0.5  # seconds from which on a wait has words of its own

_ADVICE = {
    "data loading": (
        "Make loading quicker on that rank (num_workers, prefetching, a local copy), or let the others wait "
        "longer: init_process_group(timeout=...), ddp_timeout in TrainingArguments."
    ),
    "a checkpoint": "Save on all ranks at once, or let the others wait longer (ddp_timeout).",
    "saving or loading a file": "Save on all ranks at once, or let the others wait longer (ddp_timeout).",
    COLLECTIVE: ("It called another collective than the others: all ranks must call the same, in one order."),
}
_DO_NOT_MEET = (
    "They do not find each other: the address they look at is not that of rank 0, or the network between "
    "them does not deliver. Under a launcher leave out init_method, rank and world_size, and do not set "
    "MASTER_ADDR and MASTER_PORT: then they meet at the launcher's store."
)
_NOT_ALIKE = (
    "Either they gave it different arguments (src, dst, group, shapes, the order of calls in that line), or "
    "the network does not deliver. "
    'On CPUs init_process_group("shm") compares the calls and names what differs.'
)
_LOOK_THERE = (
    "Look at that line: a lock, a network call or a loop without end; or let the others wait longer "
    "(init_process_group(timeout=...))."
)


@dataclass(frozen=True)
class Finding:
    """What the records come to.

    Attributes:
        kind: "elsewhere", "apart", "late", "alike" or "skipped".
        culprits: the ranks that the others waited for; empty where it may be any.
        text: a paragraph in plain words, what to do included.
    """

    kind: str
    culprits: tuple[int, ...]
    text: str


def compare(states: Sequence[RankState], now: float) -> Finding | None:
    """What held up a job none of whose ranks died.

    Args:
        states: of all ranks that are known, on one clock.
        now: when they were read.

    Returns:
        The finding; None where the records do not tell.
    """
    waiting = [state for state in states if state.waits_for]
    absent = _absent(states, waiting)
    if absent and max(state.waited(now) for state in waiting) >= _LATE_S:
        return _elsewhere(absent, waiting, now)
    if len(waiting) < max(2, len(states)):
        return None
    if len({state.waits_for for state in waiting}) > 1:
        settled = all(now - state.waits_since > _SETTLED_S for state in waiting)
        return _apart(waiting, now) if settled else None
    return _late(waiting) or _alike(waiting, now)


def context(
    state: RankState | None, others: Sequence[RankState], now: float, *, with_line: bool = True
) -> str:
    """For a rank that is known to be the cause: where it was, and what the others waited for meanwhile.

    Args:
        state: of that rank, if it left any.
        others: of the rest.
        now: when they were read.
        with_line: say at which line that rank was; a traceback says it better.
    """
    if state is None:
        return waits(others, now)
    shown = state if with_line else dataclasses.replace(state, stands=False, seen=now)
    known = (shown.stands or shown.phase) and not shown.over  # an end of the script is told elsewhere
    was = f"Rank {state.rank} was {whereabouts(shown, now)}." if known else ""
    return " ".join(filter(None, [was, waits(others, now)]))


def skipped_backward(states: Sequence[RankState]) -> Finding | None:
    """Which ranks ran other forwards than the rest before the pass they met in; None where none did."""
    met = max((state.passes for state in states), default=0)
    counts = {state.rank: state.forwards.get(met, 0) for state in states if state.passes == met}
    if len(set(counts.values())) < 2:
        return None
    usual = statistics.multimode(sorted(count for count in counts.values() if count))[0]
    others = {rank: count for rank, count in counts.items() if count != usual}
    told = "; ".join(f"rank {rank} ran {count or 'none'}" for rank, count in sorted(others.items()))
    skipped = all(count > usual for count in others.values())
    did = "skipped a backward after a forward" if skipped else "ran a backward more, or another forward"
    text = (
        f"before backward pass {met} {ranks(counts.keys() - others.keys())} ran {usual} "
        f"forward{'s' if usual != 1 else ''}, but {told}: {ranks(others)} {did}. All ranks must run the "
        "same; for a batch to skip, call (loss * 0).backward()."
    )
    return Finding("skipped", tuple(sorted(others)), text)


def _absent(states: Sequence[RankState], waiting: Sequence[RankState]) -> list[RankState]:
    """Those that do not wait, and have not since the others do."""
    since = min((state.waits_since for state in waiting), default=0.0)
    return [state for state in states if not state.waits_for and state.waits_since < since]


def _elsewhere(absent: Sequence[RankState], waiting: Sequence[RankState], now: float) -> Finding:
    who = tuple(state.rank for state in absent)
    doing = absent[0].doing.partition(" (")[0] if absent[0].stands else ""
    advice = _ADVICE.get(doing, _LOOK_THERE if absent[0].stands else "")
    if len(absent) == 1:
        held_up = f"held up the others: it was {whereabouts(absent[0], now)}."
    else:
        shown = [f"Rank {state.rank} was {whereabouts(state, now)}." for state in absent[:_SHOWN]]
        held_up = f"held up the others. {' '.join(shown)}"
    text = f"{ranks(who)} {held_up} {waits(waiting, now)} {advice}"
    return Finding("elsewhere", who, " ".join(text.split()))


def _apart(waiting: Sequence[RankState], now: float) -> Finding:
    lines = [f"Rank {s.rank} was at {s.line}." for s in waiting if s.line and s.stands]
    shown = " ".join(lines) if not any(s.line in s.waits_for for s in waiting) else ""
    odd = _minority(waiting)
    who = (
        f"{ranks(odd)} {'waits' if len(odd) == 1 else 'wait'} for something else than the rest" if odd else ""
    )
    passes = {s.passes for s in waiting}
    counts = "; ".join(f"rank {s.rank} has begun {s.passes} backward passes" for s in waiting)
    text = (
        f"{who or 'the ranks wait for different things'}, so nobody gets on. {waits(waiting, now)} {shown} "
        f"{f'They are out of step: {counts}.' if len(passes) > 1 else ''} All ranks must call the same "
        "collectives in one order, and run the same forwards and backwards."
    )
    return Finding("apart", odd, " ".join(text.split()))


def _minority(waiting: Sequence[RankState]) -> tuple[int, ...]:
    """The ranks that do not wait for what more than half of them wait for, if there is such a thing."""
    usual, count = Counter(state.waits_for for state in waiting).most_common(1)[0]
    odd = (state.rank for state in waiting if state.waits_for != usual)
    return tuple(odd) if 2 * count > len(waiting) else ()


def _alike(waiting: Sequence[RankState], now: float) -> Finding | None:
    """All came to the same line in time and got no further, by a call whose arguments nobody recorded."""
    if not all(s.waits_for.startswith(COLLECTIVE) and now - s.waits_since > _LATE_S for s in waiting):
        return None
    do_not_meet = all(s.waits_for.startswith(f"{COLLECTIVE} (init_process_group)") for s in waiting)
    why = _DO_NOT_MEET if do_not_meet else _NOT_ALIKE
    return Finding("alike", (), f"all ranks came, and yet it did not end. {waits(waiting, now)} {why}")


def _late(waiting: Sequence[RankState]) -> Finding | None:
    """All came; the last one long after the others."""
    ordered = sorted(waiting, key=lambda state: state.waits_since)
    last, before = ordered[-1], ordered[-2]
    if last.waits_since - before.waits_since < _LATE_S or not any(state.wait_failed for state in ordered):
        return None
    after = seconds(last.waits_since - ordered[0].waits_since)
    text = (
        f"rank {last.rank} held up the others: it came to {last.waits_for} {after} after the first, when the "
        "others had given up. Find out what kept it before that, or let the others wait longer "
        "(init_process_group(timeout=...))."
    )
    return Finding("late", (last.rank,), text)
