"""A rank that is alive but slow, noticed while the run goes on.

Every rank records how long it has waited for others in all. Who makes the others wait hardly waits itself:
over a stretch of time, the rank that waited least, while all others waited for a good part of it.

Records of several hosts are not read at one moment, so each rank's waiting is held against its own stretch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from paceline.diagnose.comparison import compare
from paceline.diagnose.deadlock import wait_for_each_other
from paceline.recorder.places import COLLECTIVE
from paceline.recorder.reading import RankState
from paceline.recorder.words import seconds, whereabouts

STRETCH_S = 20.0  # seconds that are compared
QUIET_S = 60.0  # seconds between two lines
_MUCH = 0.3  # share of the stretch that the others wait beyond what the straggler waits
_FIRST_PASSES = 3  # in which compilers and caches warm up
_HANGS_S = 10.0  # seconds in one wait from which on it is no slowness but a hang
_STARTS_S = 30.0  # ... before training is under way, when one rank may well prepare something for all
_ITS_END = (
    "It ends at the timeout of the process group they wait in: that of init_process_group, or new_group's, "
    "which is 30 min unless new_group(timeout=...) says otherwise; Ctrl-C ends it now."
)


@dataclass
class StragglerWatch:
    """Compares looks at the ranks' records. Times are seconds of one monotonic clock.

    Attributes:
        told_at: when a line was last given out.
    """

    told_at: float | None = None
    _since: float = 0.0
    _before: Mapping[int, RankState] = field(default_factory=dict)
    _lines: dict[int, Counter[str]] = field(default_factory=dict)

    def look(self, states: Mapping[int, RankState], now: float) -> str | None:
        """Take in a look at all ranks of the job; a line to show, at most once a minute.

        Args:
            states: by rank, their times on one clock.
            now: what that clock shows.
        """
        line = _hang(states, now)
        if line is not None:
            return self._tell(line, now)
        if states.keys() != self._before.keys() or not all(map(_has_begun, self._before.values())):
            self._begin(states, now)
            return None
        for rank, state in states.items():
            if not state.waits_for and state.line:
                self._lines.setdefault(rank, Counter())[_place(state)] += 1
        if now - self._since < STRETCH_S:
            return None
        line = self._straggler(states, now)
        self._begin(states, now)
        return None if line is None else self._tell(line, now)

    def _tell(self, line: str, now: float) -> str | None:
        if self.told_at is not None and now - self.told_at < QUIET_S:
            return None
        self.told_at = now
        return line

    def _begin(self, states: Mapping[int, RankState], now: float) -> None:
        self._since, self._before, self._lines = now, states, {}

    def _straggler(self, states: Mapping[int, RankState], now: float) -> str | None:
        before = self._before
        waited = {rank: _share_waited(before[rank], state) for rank, state in states.items()}
        if len(waited) < 2:
            return None
        slow = min(waited, key=lambda rank: waited[rank])
        share = min(share for rank, share in waited.items() if rank != slow) - waited[slow]
        if share < _MUCH:
            return None
        steps = states[slow].passes - before[slow].passes
        return (
            f"rank {slow} is slower than the others, who waited for it {share:.0%} of the time over the last "
            f"{now - self._since:.0f} s ({steps} steps). It was {self._mostly(slow)}"
        )

    def _mostly(self, rank: int) -> str:
        """Where a rank spent the time in which it did not wait."""
        seen = self._lines.get(rank, Counter())
        shares = [f"{count / seen.total():.0%} of its time {place}" for place, count in seen.most_common(2)]
        return " and ".join(shares) or "not seen at any line"


def _has_begun(state: RankState) -> bool:
    """Whether start-up is behind it; without the engine, whether it communicates at all."""
    return state.passes >= _FIRST_PASSES or (not state.passes and state.waited_s > 0)


def _share_waited(before: RankState, after: RankState) -> float:
    """Share of the time between two looks at a rank in which it waited."""
    stretch = after.read_at - before.read_at
    return (_waited(after) - _waited(before)) / stretch if stretch > 0 else 0.0


def _waited(state: RankState) -> float:
    """Seconds waited so far, the wait that is under way included."""
    open_wait = state.read_at - state.waits_since if state.waits_for and not state.wait_failed else 0.0
    return state.waited_s + open_wait


def _hang(states: Mapping[int, RankState], now: float) -> str | None:
    """All have been in one wait, or all but one, for so long that it is no slowness."""
    waiting = [state for state in states.values() if state.waits_for]
    absent = [state for state in states.values() if not state.waits_for]
    least = _HANGS_S if all(map(_has_begun, states.values())) else _STARTS_S
    if len(states) < 2 or len(absent) > 1 or any(now - state.waits_since < least for state in waiting):
        return None
    if not absent:
        found = compare(waiting, now)
        return None if found is None else f"{found.text} {_its_end(waiting, now)}".rstrip()
    waited = seconds(min(now - state.waits_since for state in waiting))
    return (
        f"rank {absent[0].rank} has kept the others waiting for {waited}, for {waiting[0].waits_for}. "
        f"It is {whereabouts(absent[0], now)}"
    )


def _its_end(waiting: Collection[RankState], now: float) -> str:
    """When a hang of all ranks will end, where the ranks themselves do not know it."""
    if wait_for_each_other(waiting, now) and (patience := max(state.patience for state in waiting)):
        return f"They are ended after {seconds(patience)}, the timeout of init_process_group; or by Ctrl-C."
    raw = any(state.waits_for.startswith(COLLECTIVE) for state in waiting)
    return _ITS_END if raw else ""


def _place(state: RankState) -> str:
    return f"in {state.doing}, at {state.line}" if state.doing else f"at {state.line}"
