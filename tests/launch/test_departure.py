"""Ranks that have ended well but do not leave, or that run on alone: said, and ended when overdue."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.launch.departure import EXIT_TIMEOUT_S, STUCK_S, DepartureWatch, Overdue, Standing
from paceline.recorder.reading import RankState
from tests.launch.launching import run, script

THREAD = "waiting for its thread uploader"


def follow(
    watch: DepartureWatch, until: float, *, seen: float | None = None, used: float = 0.0, over: float = 1.0
) -> tuple[list[tuple[float, str]], list[tuple[float, Overdue]]]:
    """Looks every 2 s at rank 0, which is gone, and rank 1, whose script ended at ``over``.

    ``seen``: when it gave its last sign of life; None: it always does. ``used``: processor time a second.
    """
    lines, overdue = [], []
    now = 0.0
    while now <= until:
        state = RankState(1, over=over, leaving=THREAD, seen=now if seen is None else min(seen, now))
        there = Standing(1, over, gone=False, used=used * now)
        line, late = watch.look([Standing(0, 0.0, gone=True), there], {1: state}, now)
        lines += [(now, line)] if line else []
        overdue += [(now, each) for each in late]
        now += 2.0
    return lines, overdue


def test_who_stays_is_said_every_ten_seconds_with_what_keeps_it() -> None:
    lines, overdue = follow(DepartureWatch(None), 40.0)
    assert [when for when, _ in lines] == [6.0, 16.0, 26.0, 36.0]
    assert lines[0][1] == (
        "all scripts ended 5.0 s ago, but rank 1 has not left Python: rank 1 is waiting for its thread "
        "uploader. Ended after 10 min (--exit_timeout)"
    )
    assert overdue == []


def test_a_thread_or_an_exit_handler_has_ten_minutes_and_is_missed_then() -> None:
    _, overdue = follow(DepartureWatch(None), EXIT_TIMEOUT_S + 3)
    assert overdue == [(EXIT_TIMEOUT_S + 2, Overdue(1, THREAD))]


def test_a_deadline_of_the_users_counts() -> None:
    _, overdue = follow(DepartureWatch(8.0), 11.0)
    assert overdue == [(10.0, Overdue(1, THREAD))]


def test_silent_and_idle_native_code_is_not_missed() -> None:
    _, overdue = follow(DepartureWatch(None), STUCK_S + 7, seen=1.0)
    assert [each for _, each in overdue][:1] == [Overdue(1, "")]
    assert STUCK_S < overdue[0][0] < STUCK_S + 8


@pytest.mark.parametrize("signs", [{"seen": 1.0, "used": 0.5}, {"seen": None}])
def test_who_computes_or_gives_signs_of_life_is_not_stuck(signs: dict[str, float | None]) -> None:
    _, overdue = follow(DepartureWatch(None), 3 * STUCK_S, **signs)  # type: ignore[arg-type]
    assert overdue == []


def test_scripts_that_run_on_are_said_less_and_less_often() -> None:
    watch, told = DepartureWatch(None), []
    where = RankState(1, line="train.py:41", line_since=0.0, stands=True)
    for now in range(0, 400, 2):
        state = {1: RankState(**{**vars(where), "seen": float(now)})}
        line, overdue = watch.look([Standing(0, 0.0, gone=True), Standing(1, None, gone=False)], state, now)
        assert overdue == []
        told += [(now, line)] if line else []
    assert [now for now, _ in told] == [30, 60, 120, 240]
    assert told[0][1] == "rank 0 ended 30 s ago, and rank 1 not yet. Rank 1 is busy for 30 s at train.py:41."


def stuck_in_script(watch: DepartureWatch, until: float, used: float) -> list[tuple[float, Overdue]]:
    """Looks at rank 0, which is gone, and rank 1, whose script runs on and gave its last sign at 5 s."""
    state, overdue, now = RankState(1, seen=5.0, line="train.py:9", line_since=5.0, stands=True), [], 0.0
    while now <= until:
        there = [Standing(0, 1.0, gone=True), Standing(1, None, gone=False, used=used * now)]
        overdue += [(now, each) for each in watch.look(there, {1: state}, now)[1]]
        now += 2.0
    return overdue


def test_a_script_that_is_stuck_in_native_code_when_all_others_have_ended_is_ended_and_missed() -> None:
    [(when, overdue), *_] = stuck_in_script(DepartureWatch(None), EXIT_TIMEOUT_S + 60, used=0.0)
    assert EXIT_TIMEOUT_S < when < EXIT_TIMEOUT_S + 20
    assert (
        overdue.rank == 1 and overdue.lost.startswith("stuck in native code") and "train.py:9" in overdue.lost
    )
    assert stuck_in_script(DepartureWatch(None), EXIT_TIMEOUT_S + 60, used=0.5) == []


def test_nothing_is_said_while_all_run_or_when_all_are_gone() -> None:
    for standing in (Standing(0, None, gone=False), Standing(0, 0.0, gone=True)):
        assert DepartureWatch(None).look([standing], {}, 1000.0) == ("", [])


def test_an_exit_handler_without_end(tmp_path: Path) -> None:
    text = """
import atexit, os, time
def close(): time.sleep(300)
if os.environ["RANK"] == "1": atexit.register(close)
"""
    done = run("--num_processes=2", "--exit_timeout=6", script(tmp_path, text))
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert re.match(
        r"paceline launch: all scripts ended \d\.\d s ago, but rank 1 has not left Python: rank 1 is in an "
        r"exit handler at job.py:3 in close. Ended after 6.0 s \(--exit_timeout\)",
        lines[0],
    )
    assert lines[-1] == (
        "paceline launch: rank 1 did not leave Python, and was ended: it was in an exit handler at job.py:3 "
        "in close. --exit_timeout gives it longer"
    )


def test_an_interpreter_that_is_stuck_behind_its_exit_handlers_has_ended_well(tmp_path: Path) -> None:
    text = """
import ctypes, os
class Late:
    def __del__(self, native=ctypes.PyDLL(None)): native.sleep(300)  # keeps the interpreter's lock
if os.environ["RANK"] == "1": late = Late()
"""
    done = run("--num_processes=2", "--exit_timeout=7", script(tmp_path, text))
    assert done.returncode == 0, done.stderr
    assert "rank 1 is in native code, and silent for" in done.stderr
    assert done.stderr.splitlines()[-1] == "paceline launch: ended rank 1, whose script had ended well"


def test_a_script_that_is_stuck_in_native_code(tmp_path: Path) -> None:
    text = """
import ctypes, os
if os.environ["RANK"] == "1": ctypes.PyDLL(None).sleep(300)  # keeps the interpreter's lock
"""
    done = run("--num_processes=2", "--exit_timeout=7", script(tmp_path, text))
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "paceline launch: rank 1 did not leave Python, and was ended: it was stuck in native"
    )
