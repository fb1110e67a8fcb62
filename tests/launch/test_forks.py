"""Ranks that are forked from a process with torch see what ranks that are started anew see."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from paceline.launch.config import LaunchConfig
from paceline.launch.rank_process import may_fork
from tests.launch.launching import (
    LIMIT,
    SOURCE,
    descendants,
    pids_in,
    run,
    script,
    started,
    still_alive,
    wait_for,
)

LOOK = """
import atexit, json, os, random, signal, sys, threading
atexit.register(lambda: print("left"))
seen = {
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": __file__,
    "spec": __spec__ and __spec__.name,
    "names": sorted(globals()), "main": vars(sys.modules["__main__"]) is globals(),
    "flags": str(sys.flags), "threads": threading.active_count(), "folder": os.getcwd(),
    "leads": os.getpid() == os.getsid(0) == os.getpgid(0),
    "signals": {str(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
    "streams": [(s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through, s is o)
                for s, o in ((sys.stdout, sys.__stdout__), (sys.stderr, sys.__stderr__))],
    "stdin": [sys.stdin.read(), sys.stdin.name, sys.stdin.mode, sys.stdin is sys.__stdin__],
    "descriptors": sorted(int(n) for n in os.listdir("/proc/self/fd"))[:3],
    "environment": {n: v for n, v in os.environ.items()
                    if n not in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE",
                                 "PACELINE_RECORDS")},
}
import numpy, torch
seen["torch threads"] = torch.get_num_threads()
seen["drawn"] = [random.random(), float(numpy.random.rand()), float(torch.rand(1)), torch.initial_seed()]
with open(os.path.join(os.environ["FOLDER"], os.environ["RANK"]), "w") as file:
    json.dump(seen, file)
os.rename(file.name, file.name + ".json")
if "raise" in sys.argv:
    while not all(os.path.exists(f"{os.environ['FOLDER']}/{rank}.json") for rank in range(2)): pass
    [][0]
"""


def seen(folder: Path, *words: str, **extra: str) -> tuple[list[dict[str, object]], str]:
    folder.mkdir(exist_ok=True)
    done = run("--num_processes", "2", *words, FOLDER=str(folder), **extra)
    assert done.returncode == (1 if "raise" in words else 0), done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["module", "raise"])
def test_a_forked_rank_sees_what_a_started_one_sees(tmp_path: Path, kind: str) -> None:
    job = script(tmp_path, LOOK, "my_job.py")
    what = ["-m", "my_job", "a"] if kind == "module" else [str(job), "a", kind]
    extra = {"PYTHONPATH": f"{tmp_path}:{SOURCE}"} if kind == "module" else {}
    forked, forked_out = seen(tmp_path / "forked", *what, **extra)
    plain, plain_out = seen(tmp_path / "plain", "--start_method=spawn", *what, **extra)
    for rank in range(2):
        drawn, other = forked[rank].pop("drawn"), plain[rank].pop("drawn")
        assert not set(drawn) & set(other)  # type: ignore[call-overload]
        for one in (forked[rank], plain[rank]):
            one["environment"].pop("FOLDER")  # type: ignore[attr-defined]
        assert forked[rank] == plain[rank]

    for out in (forked_out, plain_out):
        assert "fork_server" not in out and "rank_main" not in out
        assert "]: left" in out  # the other rank may be ended before it comes to that
    if kind == "raise":
        # Which of the two ranks is first is chance.
        ends = [
            [line.partition(": ")[2] for line in out.splitlines()[-3:]] for out in (forked_out, plain_out)
        ]
        assert ends[0] == ends[1] and "IndexError" in ends[0][-1]


def test_each_forked_rank_draws_its_own_numbers(tmp_path: Path) -> None:
    forked, _ = seen(tmp_path / "forked", str(script(tmp_path, LOOK)))
    one, other = (ranks["drawn"] for ranks in forked)
    assert not set(one) & set(other)  # type: ignore[call-overload]


def test_torch_is_imported_once(tmp_path: Path) -> None:
    text = "import os, sys\nprint('torch' in sys.modules, os.getppid())"
    forked = run("--num_processes", "3", script(tmp_path, text))
    lines = {line.partition(": ")[2] for line in forked.stdout.splitlines()}
    assert len(lines) == 1 and lines.pop().startswith("True "), forked.stderr


@pytest.mark.parametrize(
    ("text", "fork"),
    [
        ("import torch", True),
        ("print('OMP_NUM_THREADS')", False),
        ('os.environ["OMP_NUM_THREADS"] = "4"', False),
        ("os.environ.setdefault('TORCH_LOGS', 'all')", False),
        ("os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'x'", False),
        ("os.environ['TORCHELASTIC_RUN_ID'], os.environ['CUDA_VISIBLE_DEVICES']", True),
    ],
)
def test_a_script_that_sets_what_importing_torch_reads_is_started_anew(
    tmp_path: Path, text: str, fork: bool
) -> None:
    assert may_fork(LaunchConfig(str(script(tmp_path, text)))) == fork


def test_so_is_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    for name in ("package/train.py", "package/__main__.py"):
        (tmp_path / name).write_text("os.environ['MKL_NUM_THREADS'] = '1'")
    (tmp_path / "package" / "other.py").write_text("")
    for name, fork in (
        ("package.train", False),
        ("package", False),
        ("package.other", True),
        ("json.tool", True),
    ):
        assert may_fork(LaunchConfig(name, module=True)) == fork


def test_no_fork_without_python_or_where_it_was_not_wanted(tmp_path: Path) -> None:
    job = str(script(tmp_path, ""))
    assert may_fork(LaunchConfig(job))
    assert not may_fork(LaunchConfig(job, fork=False))
    assert not may_fork(LaunchConfig("sh", no_python=True))
    assert not may_fork(LaunchConfig(str(tmp_path)))


def test_a_module_beside_the_script_is_the_one_that_is_imported(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("mine = 'found'")
    done = run(script(tmp_path, "import code\nprint(code.mine)"))
    assert done.stdout == "found\n", done.stderr


@pytest.mark.parametrize("version", ["cuda = None", "cuda = '12.8'"])
def test_ctrl_c_while_torch_is_being_imported(tmp_path: Path, version: str) -> None:
    """By the server, or by the process that counts devices, which the signal does not reach."""
    slow = tmp_path / "torch"
    slow.mkdir()
    (slow / "__init__.py").write_text(
        f"import time\nopen({str(tmp_path / 'began')!r}, 'w').close()\ntime.sleep(300)"
    )
    (slow / "version.py").write_text(version)
    with started(script(tmp_path, "print('never')"), PYTHONPATH=f"{tmp_path}:{SOURCE}") as launch:
        wait_for([tmp_path / "began"], launch)
        below = descendants(launch.pid)
        launch.send_signal(signal.SIGINT)
        out, err = launch.communicate(timeout=LIMIT)
    assert (launch.returncode, out) == (130, "")
    assert "ended by SIGINT" in err
    assert still_alive(below) == []


def test_a_killed_fork_server_ends_the_run(tmp_path: Path) -> None:
    text = """
import os, time
with open(os.environ["FOLDER"] + "/new", "w") as file: file.write(str(os.getpid()))
os.rename(os.environ["FOLDER"] + "/new", os.environ["FOLDER"] + "/pid_rank")
with open(os.environ["FOLDER"] + "/server", "w") as file: file.write(str(os.getppid()))
time.sleep(300)
"""
    with started(script(tmp_path, text), FOLDER=str(tmp_path)) as launch:
        wait_for([tmp_path / "pid_rank", tmp_path / "server"], launch)
        os.kill(int((tmp_path / "server").read_text()), signal.SIGKILL)
        launch.communicate(timeout=LIMIT)
    assert launch.returncode == 137
    assert still_alive(pids_in(tmp_path), within=0) == []
