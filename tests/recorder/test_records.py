"""What was written is read again: after SIGKILL, beside a fork, and without what is torn."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.recorder.layout import (
    FACT_BYTES,
    RING_AT,
    RING_FACTS,
    TEXT_BYTES,
    WHERE_AT,
    Kind,
    open_file,
    read_text,
    write_text,
)
from paceline.recorder.reading import RankState, facts_in, names_beside, read_folder, read_state
from paceline.recorder.ring import Recorder

SOURCE = Path(__file__).resolve().parents[2] / "src"


def record(folder: Path, rank: int = 0) -> tuple[Recorder, Path]:
    memory = open_file(folder, f"rank_{rank}", rank, 2)
    assert memory is not None
    path = folder / f"rank_{rank}.record"
    return Recorder(memory, path.with_suffix(".names")), path


def run_rank(folder: Path, code: str, rank: str = "0", **more: str) -> subprocess.CompletedProcess[str]:
    place = {"RANK": rank, "WORLD_SIZE": "2", "PACELINE_RECORDS": str(folder), "PYTHONPATH": str(SOURCE)}
    head = "from paceline.recorder.ring import recorder\nfrom paceline.recorder.layout import Kind\n"
    return subprocess.run(
        [sys.executable, "-c", head + code],
        env={**os.environ, **place, **more},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def state_in(folder: Path, rank: int = 0) -> RankState:
    return read_folder(folder)[rank]


def test_facts_come_back_in_order_with_their_names(tmp_path: Path) -> None:
    mine, path = record(tmp_path)
    mine.step, mine.micro_batch = 7, 2
    mine.add(Kind.BACKWARD, 118)
    mine.add(Kind.LAUNCHED, 118, mine.name_of(("plan", 3), lambda: "bucket 3 of 4\n(a, b)"), 4096)
    mine.add(Kind.LAUNCHED, 118, mine.name_of(("plan", 3), lambda: "never asked again"), 4096)
    facts = facts_in(path.read_bytes(), names_beside(path))
    assert [(f.kind, f.count, f.name, f.size) for f in facts] == [
        (Kind.BACKWARD, 118, "", 0),
        (Kind.LAUNCHED, 118, "bucket 3 of 4 (a, b)", 4096),
        (Kind.LAUNCHED, 118, "bucket 3 of 4 (a, b)", 4096),
    ]
    assert {(f.step, f.micro_batch) for f in facts} == {(7, 2)}
    assert read_state(path).phase == (
        "backward pass 118, bucket 3 of 4 (a, b) launched (step 7, micro-batch 2)"
    )  # type: ignore[union-attr]


def test_the_ring_keeps_the_newest(tmp_path: Path) -> None:
    mine, path = record(tmp_path)
    for number in range(RING_FACTS + 10):
        mine.add(Kind.FORWARD, number)
    facts = facts_in(path.read_bytes(), {})
    assert [fact.count for fact in facts] == list(range(10, RING_FACTS + 10))


@pytest.mark.parametrize("cut", [1, 7, 8, 12, 16, 18, 20, 24, 32, 40, 48, 56, 57, 63])
def test_a_torn_fact_is_left_out_wherever_it_was_torn(tmp_path: Path, cut: int) -> None:
    """The newest fact, of which only the first bytes were written over what was there before."""
    mine, path = record(tmp_path)
    for number in range(RING_FACTS + 2):
        mine.add(Kind.FORWARD, number)
    memory = bytearray(path.read_bytes())
    at = RING_AT + 2 * FACT_BYTES  # where fact RING_FACTS + 2 lies now, and 2 lay before
    old = struct.pack("<QdHHIIIQQQQ", 2, 1.0, Kind.FORWARD, 0, 0, 0, 0, 1, 0, 0, 2)
    memory[at + cut : at + FACT_BYTES] = old[cut:]
    counts = [fact.count for fact in facts_in(bytes(memory), {})]
    assert counts == sorted(counts)
    whole = memory[at : at + FACT_BYTES] == path.read_bytes()[at : at + FACT_BYTES]
    assert (RING_FACTS + 1 in counts) == whole


@pytest.mark.parametrize("cut", range(0, 24))
def test_of_a_torn_text_the_one_before_is_read(cut: int) -> None:
    memory = bytearray(WHERE_AT + 2 * TEXT_BYTES)
    write_text(memory, WHERE_AT, 1, "first")
    write_text(memory, WHERE_AT, 2, "second")
    before = bytes(memory)
    write_text(memory, WHERE_AT, 3, "the third")
    place = WHERE_AT + TEXT_BYTES
    memory[place + cut : place + 24] = before[place + cut : place + 24]
    assert read_text(bytes(memory), WHERE_AT)[2] == "second"


def test_a_text_that_is_too_long_is_cut_and_a_strange_one_replaced() -> None:
    memory = bytearray(WHERE_AT + 2 * TEXT_BYTES)
    write_text(memory, WHERE_AT, 1, "é\udcff" * 5000)
    assert read_text(bytes(memory), WHERE_AT)[2].startswith("é?é?")


def test_a_record_survives_sigkill(tmp_path: Path) -> None:
    code = "recorder().add(Kind.BACKWARD, 4)\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    assert run_rank(tmp_path, code).returncode == -signal.SIGKILL
    state = state_in(tmp_path)
    assert (state.phase, state.passes) == ("backward pass 4", 4)


def test_a_wait_that_is_under_way_is_told_with_its_words(tmp_path: Path) -> None:
    code = """
with recorder().waiting:
    recorder().say("the wait before")
recorder().add(Kind.BACKWARD, 4)
with recorder().waiting:
    with recorder().waiting: pass
    recorder().say("bucket 1 of 2 (a, b)")
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
"""
    run_rank(tmp_path, code)
    state = state_in(tmp_path)
    assert state.waits_for == "bucket 1 of 2 (a, b)" and not state.wait_failed
    assert state.waits_since > state.phase_since


def test_waits_end_fail_and_add_up(tmp_path: Path) -> None:
    mine, path = record(tmp_path)
    for _ in range(2):
        with mine.waiting:
            time.sleep(0.05)
    ended = read_state(path)
    assert ended is not None and ended.waits_for == "" and 0.1 <= ended.waited_s < 5
    with pytest.raises(ValueError, match="lost"), mine.waiting:
        raise ValueError("lost")
    failed = read_state(path)
    assert failed is not None and failed.waits_for and failed.wait_failed
    assert failed.waited(failed.waits_until + 100) == failed.waits_until - failed.waits_since


def test_a_rank_that_went_on_after_an_error_does_not_seem_to_wait(tmp_path: Path) -> None:
    mine, path = record(tmp_path)
    with pytest.raises(ValueError, match="lost"), mine.waiting:
        raise ValueError("lost")
    mine.raised("ValueError: lost")
    mine.add(Kind.FORWARD, 2)
    state = read_state(path)
    assert state is not None
    assert (state.waits_for, state.raised, state.forwards) == ("", "", {2: 1})
    assert state.phase == "forward before backward pass 2"


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    code = """
import os
recorder().add(Kind.BACKWARD, 4, recorder().name("mine"))
if os.fork() == 0:
    for number in range(100):
        recorder().add(Kind.BACKWARD, 1000 + number, recorder().name(f"child's {number}"))
        with recorder().waiting: recorder().say("child's")
    os._exit(0)
os.wait()
recorder().add(Kind.PASS_FINISHED, 4)
"""
    done = run_rank(tmp_path, code)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "rank_0.record"
    facts = facts_in(path.read_bytes(), names_beside(path))
    assert [(f.kind, f.count) for f in facts] == [(Kind.BACKWARD, 4), (Kind.PASS_FINISHED, 4)]
    assert "child" not in path.with_suffix(".names").read_text()


def test_a_helper_with_the_ranks_environment_leaves_its_record_alone(tmp_path: Path) -> None:
    code = """
import subprocess, sys
recorder().add(Kind.BACKWARD, 4)
helper = "from paceline.recorder.ring import recorder, Kind; recorder().add(Kind.BACKWARD, 99)"
subprocess.run([sys.executable, "-c", helper], check=True, timeout=30)
"""
    done = run_rank(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert state_in(tmp_path).passes == 4


def test_a_rank_that_is_started_again_begins_anew(tmp_path: Path) -> None:
    run_rank(tmp_path, "recorder().add(Kind.BACKWARD, 4)")
    run_rank(tmp_path, "recorder().add(Kind.FORWARD, 1)")
    assert (state_in(tmp_path).passes, state_in(tmp_path).phase) == (0, "forward before backward pass 1")


@pytest.mark.parametrize("folder", ["off", "", "/proc/no/such/place"])
def test_without_a_folder_nothing_is_recorded_and_nothing_fails(tmp_path: Path, folder: str) -> None:
    code = """
import threading
r = recorder()
r.add(Kind.BACKWARD, 4, r.name("x")); r.say("y"); r.phase("z"); r.introduce(0, 2)
with r.waiting: pass
assert r.path == "" and threading.active_count() == 1
"""
    done = run_rank(tmp_path, code, PACELINE_RECORDS=folder)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


STAND = """
import os, sys, time
from paceline.recorder.ring import recorder
recorder()
def stand():
    time.sleep(2.5)
"""
# A stand-in for a package that calls back, and is where the user's code is not.
LIBRARY = """
import time
def call(function):
    function()
def wait():
    time.sleep(2.5)
"""


@pytest.mark.parametrize(
    ("call", "line", "inner", "doing"),
    [
        ("stand()", "job.py:6 in stand", "", ""),
        ("loader.call(stand)", "job.py:6 in stand", "", "data loading"),
        ("loader.wait()", "job.py:9", "utils/data/loader.py:6 in wait", "data loading"),
    ],
)
def test_where_the_main_thread_stands_is_told(
    tmp_path: Path, call: str, line: str, inner: str, doing: str
) -> None:
    library = tmp_path / "torch" / "utils" / "data"
    library.mkdir(parents=True)
    for folder in (library, library.parent, library.parent.parent):
        (folder / "__init__.py").touch()
    (library / "loader.py").write_text(LIBRARY)
    job = tmp_path / "job.py"
    job.write_text(f"{STAND}from torch.utils.data import loader\n\n{call}\nos._exit(0)\n")
    place = {"RANK": "1", "WORLD_SIZE": "2", "PACELINE_RECORDS": str(tmp_path), "PYTHONPATH": str(SOURCE)}
    # -S: so that nothing that is installed imports the real torch.
    subprocess.run([sys.executable, "-S", str(job)], env={**os.environ, **place}, check=True, timeout=60)
    state = state_in(tmp_path, 1)
    assert (state.line, state.inner, state.doing) == (line, inner, doing)
    assert state.asleep and state.stands
    assert 1.0 < state.seen - state.line_since < 5.0


@pytest.mark.parametrize(
    ("call", "still"), [("time.sleep(2.5)", True), ("for _ in range(50): time.sleep(0.05)", False)]
)
def test_standing_still_is_told_from_coming_by_again(tmp_path: Path, call: str, still: bool) -> None:
    (tmp_path / "job.py").write_text(f"{STAND}\n{call}\nos._exit(0)\n")
    place = {"RANK": "1", "WORLD_SIZE": "2", "PACELINE_RECORDS": str(tmp_path), "PYTHONPATH": str(SOURCE)}
    words = [sys.executable, "-S", str(tmp_path / "job.py")]
    subprocess.run(words, env={**os.environ, **place}, check=True, timeout=60)
    state = state_in(tmp_path, 1)
    assert state.line == "job.py:8" and 0.5 < state.seen - state.line_since < 5.0
    assert (state.still_since - state.line_since < 0.5) == still


def test_files_that_are_no_records_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "empty.record").touch()
    (tmp_path / "torn.record").write_bytes(b"paceline record 1\n{")
    (tmp_path / "other.record").write_bytes(os.urandom(1 << 20))
    assert read_folder(tmp_path) == {}


def test_states_travel_as_json(tmp_path: Path) -> None:
    mine, path = record(tmp_path, rank=1)
    mine.add(Kind.FORWARD, 3)
    mine.add(Kind.BACKWARD, 3)
    state = read_state(path)
    assert state is not None and state.forwards == {3: 1}
    assert RankState.from_json(json.loads(json.dumps(vars(state)))) == state
    assert state.moved(10).phase_since == state.phase_since + 10
