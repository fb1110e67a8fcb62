"""Ranks that are still there when others have ended well: said while it lasts, and ended at a deadline.

    some scripts have ended, others run on                said, less and less often
    ... and what runs on is stuck in native code          ended when it is overdue
    all scripts have ended, an interpreter has not        said every ten seconds; ended when it is overdue

Note: what keeps an interpreter
    A thread that is no daemon, an exit handler, a child that multiprocessing joins: all may do something that
    matters, such as sending the last files away, so they have ten minutes. Behind them only native code is
    left. PyTorch can wait there for ever, with the interpreter's lock in hand, for a thread of Gloo that
    needs the lock. Then the rank's record falls silent and it uses no processor time; after half a minute
    of that nothing more can come of it, and since its script had ended well, so has the rank.

Note: what keeps a script
    The same can happen when a process group goes, at the end of many scripts. While its script runs a rank
    may well have something to do of which nothing is seen, and what comes after it would be missing. So such
    a rank has ten minutes, and to end it is a failure.

Pure: nothing here touches a process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.recorder.reading import RankState
from paceline.recorder.words import ranks, seconds, whereabouts

EXIT_TIMEOUT_S = 600.0  # for threads and exit handlers
STUCK_S = 30.0  # for an interpreter behind them
_SILENT_S = 3.0  # seconds without a sign of life, of which one is due every second
_USED_S = 0.05  # seconds of processor time between two looks from which on something is done
_STUCK = "stuck in native code that lets no Python run, and idle"
_FIRST_S, _AGAIN_S = 5.0, 10.0  # seconds until it is said, and said again, that interpreters do not end
_RUN_ON_S = 30.0  # ... that scripts run on; from then on after twice as long each time


@dataclass(frozen=True)
class Standing:
    """How far a rank has come.

    Attributes:
        rank: global rank.
        over_since: when its script ended; None while it runs, or where nobody tells.
        gone: its process has ended.
        used: seconds of processor time of its process.
    """

    rank: int
    over_since: float | None
    gone: bool
    used: float = 0.0


@dataclass(frozen=True)
class Overdue:
    """A rank to end.

    Attributes:
        rank: global rank.
        lost: what it was still doing that may matter, in words; "" when only native code was left.
    """

    rank: int
    lost: str


@dataclass
class DepartureWatch:
    """Compares looks at the ranks of one host in one round. Times are monotonic seconds.

    Attributes:
        exit_timeout: seconds an interpreter has for its end; None: see the note above.
    """

    exit_timeout: float | None
    _told_at: float | None = None
    _run_on_s: float = _RUN_ON_S
    _used: dict[int, float] = field(default_factory=dict)
    _stuck_since: dict[int, float] = field(default_factory=dict)

    def look(
        self, standings: Sequence[Standing], states: Mapping[int, RankState], now: float
    ) -> tuple[str, list[Overdue]]:
        """Take in a look, none of the ranks having failed.

        Args:
            standings: of all ranks of this host.
            states: what is recorded of them, as far as it is.
            now: when that was read.

        Returns:
            A line to show, which may be empty, and the ranks to end.
        """
        there = [standing for standing in standings if not standing.gone]
        ends = [standing.over_since for standing in standings if standing.over_since is not None]
        if not there or not ends:
            return "", []
        for standing in there:
            self._notice_whether_stuck(standing, states.get(standing.rank), now)
        if len(ends) < len(standings):
            line = self._running_on(standings, states, now - max(ends), now)
            return line, self._stuck_in_script(standings, states, now)
        late = now - max(ends)
        overdue = [
            Overdue(each.rank, "" if each.rank in self._stuck_since else self._why(each.rank, states, now))
            for each in there
            if late > self._patience or self._is_stuck_for_good(each.rank, now)
        ]
        return self._staying(there, states, late, now), overdue

    @property
    def _patience(self) -> float:
        return EXIT_TIMEOUT_S if self.exit_timeout is None else self.exit_timeout

    def _running_on(
        self, standings: Sequence[Standing], states: Mapping[int, RankState], since: float, now: float
    ) -> str:
        if since < _RUN_ON_S or (self._told_at is not None and now - self._told_at < self._run_on_s):
            return ""
        if self._told_at is not None:
            self._run_on_s *= 2
        self._told_at = now
        ended = ranks(each.rank for each in standings if each.over_since is not None)
        rest = [each.rank for each in standings if each.over_since is None]
        where = [f"Rank {rank} is {whereabouts(states[rank], now)}." for rank in rest[:3] if rank in states]
        stuck = [rank for rank in rest if now - self._stuck_since.get(rank, now) >= _FIRST_S]
        if stuck:
            where.append(f"{ranks(stuck).capitalize()}: {_STUCK}. {self._limit_of(self._patience)}")
        return f"{ended} ended {seconds(since)} ago, and {ranks(rest)} not yet. {' '.join(where)}".rstrip()

    def _stuck_in_script(
        self, standings: Sequence[Standing], states: Mapping[int, RankState], now: float
    ) -> list[Overdue]:
        return [
            Overdue(each.rank, f"{_STUCK}, {whereabouts(states[each.rank], now)}")
            for each in standings
            if each.over_since is None and now - self._stuck_since.get(each.rank, now) >= self._patience
        ]

    def _staying(
        self, there: Sequence[Standing], states: Mapping[int, RankState], late: float, now: float
    ) -> str:
        if late < _FIRST_S or (self._told_at is not None and now - self._told_at < _AGAIN_S):
            return ""
        self._told_at = now
        why = "; ".join(f"rank {each.rank} is {self._why(each.rank, states, now)}" for each in there[:3])
        return (
            f"all scripts ended {seconds(late)} ago, but {ranks(each.rank for each in there)} "
            f"{'has' if len(there) == 1 else 'have'} not left Python: {why}. {self._limit(there)}"
        )

    def _limit(self, there: Sequence[Standing]) -> str:
        stuck = self.exit_timeout is None and all(each.rank in self._stuck_since for each in there)
        return self._limit_of(STUCK_S if stuck else self._patience)

    @staticmethod
    def _limit_of(patience: float) -> str:
        return f"Ended after {seconds(patience)} (--exit_timeout)"

    def _why(self, rank: int, states: Mapping[int, RankState], now: float) -> str:
        state = states.get(rank)
        if state is None or not state.over:
            return "still there"
        if now - state.seen > _SILENT_S:
            return f"in native code, and silent for {seconds(now - state.seen)}"
        return state.leaving or "about to"

    def _notice_whether_stuck(self, standing: Standing, state: RankState | None, now: float) -> None:
        rank = standing.rank
        silent = state is not None and now - state.seen > _SILENT_S
        idle = standing.used - self._used.get(rank, 0.0) < _USED_S
        self._used[rank] = standing.used
        if silent and idle:
            self._stuck_since.setdefault(rank, now)
        else:
            self._stuck_since.pop(rank, None)

    def _is_stuck_for_good(self, rank: int, now: float) -> bool:
        return self.exit_timeout is None and now - self._stuck_since.get(rank, now) >= STUCK_S
