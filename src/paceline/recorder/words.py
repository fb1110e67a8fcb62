"""Sentences about ranks: where one was, and what others waited for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.recorder.reading import RankState

_STOOD_S = 1.5  # seconds at one line from which on "for how long" is worth saying
_SILENT_S = 3.0  # seconds without a sign of life, of which one is due every second


def ranks(numbers: Iterable[int]) -> str:
    """As ``rank 3``, ``ranks 0 and 2``, ``ranks 0, 1 and 2``; long runs as ``ranks 0-7``."""
    parts = [f"{first}" if first == last else f"{first}-{last}" for first, last in _runs(sorted(numbers))]
    word = "rank" if len(parts) == 1 and "-" not in parts[0] else "ranks"
    return f"{word} {' and '.join(filter(None, [', '.join(parts[:-1]), parts[-1]]))}"


def seconds(duration: float) -> str:
    """As ``0.4 s``, ``41 s``, ``12 min``."""
    if duration < 10:
        return f"{max(duration, 0.0):.1f} s"
    return f"{duration:.0f} s" if duration < 600 else f"{duration / 60:.0f} min"


def whereabouts(state: RankState, now: float) -> str:
    """Where a rank was, to follow "was": ``asleep in data loading for 41 s at train.py:12 in load, ...``.

    Args:
        state: of the rank.
        now: when it was looked at, on the same clock.
    """
    if state.over:
        return f"past the end of its script for {seconds(now - state.over)}"
    silent = now - state.seen
    stood = (state.seen if silent > _SILENT_S else now) - state.line_since
    parts = []
    line = state.line if state.stands else ""
    if line and stood >= _STOOD_S:
        doing = f" in {state.doing}" if state.doing else ""
        parts.append(f"{'asleep' if state.asleep else 'busy'}{doing} for {seconds(stood)} at {line}")
    elif line:
        parts.append(f"at {line}")
    if state.inner and line:
        parts[-1] += f" (there in {state.inner})"
    if state.phase:
        parts.append(_in_phase(state.phase))
    if silent > _SILENT_S:
        parts.append(f"last heard of {seconds(silent)} before")
    return ", ".join(parts) or "not heard of: it recorded nothing"


def waits(states: Sequence[RankState], now: float) -> str:
    """What these ranks waited for, a sentence for each thing; "" when none waited."""
    by_words: dict[str, list[RankState]] = {}
    for state in states:
        if state.waits_for:
            by_words.setdefault(state.waits_for, []).append(state)
    return " ".join(
        f"{ranks(s.rank for s in those).capitalize()} had waited "
        f"{seconds(max(s.waited(now) for s in those))} for {words}."
        for words, those in by_words.items()
    )


def _in_phase(phase: str) -> str:
    return phase if phase.startswith(("after", "between", "before", "loading", "saving")) else f"in {phase}"


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Numbers in order as (first, last) of what follows one another, where that are three or more."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    pairs = [
        [(first, first), (last, last)] if last == first + 1 else [(first, last)] for first, last in found
    ]
    return [pair for each in pairs for pair in each]
