"""A rank that crashes in native code, or is stuck there with the interpreter's lock, still tells its line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.recorder.reading import RankState, read_state
from paceline.recorder.stacks import ask, main_stack

SOURCE = Path(__file__).resolve().parents[2] / "src"
HEAD = """
import ctypes, os, signal, sys, time
from paceline.recorder.ring import observe
script_is_over = observe()
"""


def start(folder: Path, text: str) -> subprocess.Popen[bytes]:
    job = folder / "job.py"
    job.write_text(HEAD + text)
    place = {"RANK": "0", "WORLD_SIZE": "1", "PACELINE_RECORDS": str(folder), "PYTHONPATH": str(SOURCE)}
    return subprocess.Popen([sys.executable, "-S", str(job)], env={**os.environ, **place})


def state_after(folder: Path, text: str) -> RankState:
    with start(folder, text) as process:
        process.wait(timeout=30)
    state = read_state(folder / "rank_0.record")
    assert state is not None
    return state


@pytest.mark.parametrize(
    "crash", ["os.abort()", "ctypes.string_at(0)", "os.kill(os.getpid(), signal.SIGBUS)"]
)
def test_a_crash_leaves_its_line(tmp_path: Path, crash: str) -> None:
    state = state_after(tmp_path, f"def step():\n    {crash}\nstep()\n")
    assert (state.line, state.stands) == ("job.py:6 in step", True)


def test_who_is_stuck_with_the_interpreters_lock_tells_where_when_asked(tmp_path: Path) -> None:
    text = """
def stuck():
    lib = ctypes.PyDLL(None)  # keeps the lock
    open(sys.argv[0] + ".ready", "w").close()
    while True: lib.sleep(100)
stuck()
"""
    with start(tmp_path, text) as process:
        deadline = time.monotonic() + 30
        while not (tmp_path / "job.py.ready").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.2)
        assert ask(process.pid)
        while True:  # until it has been written to its end, where the main thread stands
            places = main_stack(tmp_path / "rank_0.stacks")
            if (places and places[-1].name == "<module>") or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        assert process.poll() is None  # it was asked, not harmed
        process.kill()
    assert [place.name for place in places] == ["stuck", "<module>"]
    state = read_state(tmp_path / "rank_0.record")
    assert state is not None and state.line == "job.py:9 in stuck"


def test_who_would_die_of_the_question_is_not_asked() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        assert not ask(process.pid)
        assert process.poll() is None
        process.kill()
    assert not ask(process.pid)


def test_of_many_threads_the_crashed_one_counts_else_the_main_one(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.stacks"
    other = 'Thread 0x1 (most recent call first):\n  File "other.py", line 1 in run\n\n'
    main = 'Thread 0x2 (most recent call first):\n  File "main.py", line 2 in step\n'
    crashed = 'Current thread 0x3 (most recent call first):\n  File "native.py", line 3 in call\n\n'
    path.write_text(other + main)
    assert main_stack(path)[0].path == "main.py"
    path.write_text(f"Fatal Python error: Aborted\n\n{crashed}{other}{main}\nExtension modules: x\n")
    assert main_stack(path)[0].path == "native.py"
    nameless = "Current thread 0x3 (most recent call first):\n  <no Python frame>\n\n"
    path.write_text(f"{other}{main}Fatal Python error: Aborted\n\n{nameless}{other}{main}")
    assert main_stack(path)[0].path == "main.py"
    assert main_stack(tmp_path / "none") == []


def test_whoever_watches_for_crashes_himself_goes_on_seeing_them(tmp_path: Path) -> None:
    text = "import faulthandler; sys.stderr.write(str(faulthandler.is_enabled())); os.abort()"
    job = tmp_path / "job.py"
    job.write_text(HEAD + text)
    place = {"RANK": "0", "WORLD_SIZE": "1", "PACELINE_RECORDS": str(tmp_path), "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-S", "-X", "faulthandler", str(job)],
        env={**os.environ, **place}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGABRT
    assert done.stderr.startswith("TrueFatal Python error: Aborted")


def test_a_crash_of_a_forked_helper_is_not_the_ranks(tmp_path: Path) -> None:
    state_after(tmp_path, "if os.fork() == 0: os.abort()\nassert os.wait()[1] & 127 == signal.SIGABRT\n")
    assert (tmp_path / "rank_0.stacks").read_text() == ""


def test_an_exception_leaves_the_line_that_raised_it(tmp_path: Path) -> None:
    text = """
def step():
    raise ValueError
try: step()
except ValueError as error: script_is_over(error.__traceback__)
time.sleep(1.5)  # the interpreter shuts down, and is not where the script was
os._exit(1)
"""
    state = state_after(tmp_path, text)
    assert (state.line, state.over) == ("job.py:7 in step", 0.0)


LEAVING = {
    "thread": ("threading.Thread(target=time.sleep, args=(2.5,), name='uploader').start()",
               "waiting for its thread uploader"),
    "handler": ("def close(): time.sleep(2.5)\natexit.register(close)",
                "in an exit handler at job.py:7 in close"),
    "child": ("multiprocessing.get_context('fork').Process(target=time.sleep, args=(2.5,)).start()",
              "waiting for processes that it started with multiprocessing"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LEAVING)
def test_what_holds_up_the_interpreters_end_is_told(tmp_path: Path, kind: str) -> None:
    code, words = LEAVING[kind]
    state = state_after(
        tmp_path, f"\nimport atexit, multiprocessing, threading\n{code}\nscript_is_over(None)\n"
    )
    assert (state.over > 0, state.leaving) == (True, words)


def test_a_short_script_leaves_no_line_of_its_start(tmp_path: Path) -> None:
    state = state_after(tmp_path, "script_is_over(None)\n")
    assert state.line == "" and state.over > 0
