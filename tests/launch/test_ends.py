"""However a launch ends: the right exit status, the right words last, and no process left behind."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.launch.launching import (
    LIMIT,
    SOURCE,
    command,
    environment,
    pids_in,
    run,
    script,
    started,
    still_alive,
    wait_for,
)

# Every rank starts two children: one as data loading workers are, one that leaves its rank's session.
FAMILY = """
import os, subprocess, sys, time
folder, rank = os.environ["FOLDER"], os.environ["RANK"]
children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=away)
            for away in (False, True)]
for name, pid in (("rank", os.getpid()), ("near", children[0].pid), ("away", children[1].pid)):
    with open(f"{folder}/new_{rank}", "w") as file:
        file.write(str(pid))
    os.rename(file.name, f"{folder}/pid_{name}_{rank}")
"""
WAIT = "time.sleep(300)\n"


def family(folder: Path, ranks: int) -> list[Path]:
    return [folder / f"pid_{name}_{rank}" for name in ("rank", "near", "away") for rank in range(ranks)]


def last_lines(done: subprocess.CompletedProcess[str], number: int = 15) -> str:
    return "\n".join(done.stderr.splitlines()[-number:])


def test_an_exception_is_the_last_thing_on_the_screen(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        "import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('boom-4711')\ntime.sleep(300)",
    )
    done = run("--num_processes", "2", "--log_dir", tmp_path / "logs", job)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "[rank1]: ValueError: boom-4711"
    assert "paceline launch: rank 1 failed first (exit code 1, pid " in last_lines(done)
    assert "paceline launch: rank 0 was stopped by the launcher" in last_lines(done)
    [log] = (tmp_path / "logs").rglob("attempt_0/1/stderr.log")
    assert f"all that rank 1 wrote to stderr: {log}" in last_lines(done)
    assert log.read_text().endswith("ValueError: boom-4711\n")


def test_who_raised_need_not_be_gone_for_the_others_to_be_stopped(tmp_path: Path) -> None:
    """An interpreter that shuts down slowly keeps its connections; it may do so, for a while."""
    text = """
import atexit, time
if os.environ["RANK"] == "1":
    atexit.register(lambda: print("tidied up") or time.sleep({seconds}))
    sys.stderr = open(os.devnull, "w")
    raise ValueError("mine")
time.sleep(300)
"""
    for seconds in (0.5, 300):
        done = run("--num_processes", "2", script(tmp_path, FAMILY + text.format(seconds=seconds)),
                   FOLDER=str(tmp_path))  # fmt: skip
        assert done.returncode == 1
        assert done.stdout == "[rank1]: tidied up\n"
        assert "rank 1 failed first (exit code 1" in done.stderr
        assert last_lines(done, 1) == "[rank1]: ValueError: mine"
        assert still_alive(pids_in(tmp_path), within=0) == []


def test_a_peer_that_notices_first_is_not_blamed(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        """
import atexit, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    atexit.register(__import__("time").sleep, 1)     # a long farewell, the connection already cut
    atexit.register(dist.destroy_process_group)
    raise KeyError("the cause")
dist.all_reduce(torch.ones(1))
""",
    )
    done = run("--num_processes", "2", job)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "[rank1]: KeyError: 'the cause'"
    assert "rank 1 failed first" in last_lines(done)


@pytest.mark.parametrize(
    ("ending", "status", "last"),
    [
        ("sys.exit(3)", 3, "rank 1 wrote nothing to stderr before it ended with exit code 3"),
        ("os._exit(7)", 7, "ended with exit code 7"),
        ("sys.exit('no data')", 1, "[rank1]: no data"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was killed by SIGKILL"),
        ("os.abort()", 134, "rank 1 was killed by SIGABRT"),
    ],
)
def test_exit_status_and_last_line(tmp_path: Path, ending: str, status: int, last: str) -> None:
    job = script(
        tmp_path, f"import os, signal, sys, time\nif os.environ['RANK'] == '1': {ending}\ntime.sleep(300)"
    )
    done = run("--num_processes", "2", job)
    assert done.returncode == status
    assert last in last_lines(done, 1)


def test_a_killed_rank_takes_the_others_and_all_children_along(tmp_path: Path) -> None:
    job = script(tmp_path, FAMILY + WAIT)
    with started("--num_processes", "2", job, FOLDER=str(tmp_path)) as launch:
        wait_for(family(tmp_path, 2), launch)
        os.kill(int((tmp_path / "pid_rank_1").read_text()), signal.SIGKILL)
        _, err = launch.communicate(timeout=LIMIT)
    assert launch.returncode == 137
    assert "rank 1 was killed by SIGKILL" in err.splitlines()[-1]
    assert still_alive(pids_in(tmp_path), within=0) == []


def test_a_killed_launcher_takes_everything_along(tmp_path: Path) -> None:
    job = script(tmp_path, FAMILY + WAIT)
    with started("--num_processes", "2", job, FOLDER=str(tmp_path), TMPDIR=str(tmp_path)) as launch:
        wait_for(family(tmp_path, 2), launch)
        launch.kill()
        launch.communicate(timeout=LIMIT)
        assert still_alive(pids_in(tmp_path)) == []


def test_children_do_not_outlive_a_launch_that_went_well(tmp_path: Path) -> None:
    done = run(script(tmp_path, FAMILY), FOLDER=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert still_alive(pids_in(tmp_path), within=0) == []
    assert len(pids_in(tmp_path)) == 3


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_to_the_launcher_ends_everything(tmp_path: Path, number: int, status: int) -> None:
    job = script(tmp_path, FAMILY + WAIT)
    with started("--num_processes", "2", job, FOLDER=str(tmp_path)) as launch:
        wait_for(family(tmp_path, 2), launch)
        launch.send_signal(number)
        _, err = launch.communicate(timeout=LIMIT)
    assert launch.returncode == status
    assert err.splitlines()[-1].startswith(f"paceline launch: ended by {signal.Signals(number).name}")
    assert still_alive(pids_in(tmp_path), within=0) == []


@pytest.mark.slow
def test_ranks_may_tidy_up_after_a_signal_and_the_stubborn_are_killed(tmp_path: Path) -> None:
    tidy = """
import signal
def tidy_up(*_):
    if rank == "0":
        open(folder + "/tidied", "w").close()
        sys.exit(0)
signal.signal(signal.SIGTERM, tidy_up)      # rank 1 takes no notice
open(f"{folder}/ready_{rank}", "w").close()
while True: time.sleep(1)
"""
    job = script(tmp_path, FAMILY + tidy)
    with started("--num_processes=2", "--shutdown_timeout=3", job, FOLDER=str(tmp_path)) as launch:
        wait_for([tmp_path / "ready_0", tmp_path / "ready_1"], launch)
        launch.terminate()
        launch.communicate(timeout=LIMIT)
    assert launch.returncode == 143
    assert (tmp_path / "tidied").exists()
    assert still_alive(pids_in(tmp_path), within=0) == []


@pytest.mark.slow
def test_restart_meets_anew_on_the_same_port(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        """
import os, signal, sys, torch, torch.distributed as dist
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if attempt < 2 and dist.get_rank() == attempt:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(total)
print(f"attempt {attempt}: {total.item()}")
""",
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    restarts = ["--max_restarts", "2", "--main_process_port", str(port)]
    done = run("--num_processes", "2", *restarts, "--log_dir", tmp_path / "logs", job)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank0]: attempt 2: 4.0", "[rank1]: attempt 2: 4.0"]
    assert "rank 0 was killed by SIGKILL" in done.stderr
    assert "rank 1 was killed by SIGKILL" in done.stderr
    assert "paceline launch: starting all ranks again (attempt 3 of 3)" in done.stderr
    assert len(list((tmp_path / "logs").rglob("attempt_*"))) == 3


def test_restarts_are_counted(tmp_path: Path) -> None:
    job = script(tmp_path, "raise OSError('never works')")
    done = run("--max-restarts=1", "--main_process_port=0", job)
    assert done.returncode == 1
    assert done.stderr.count("rank 0 failed first") == 2
    assert "attempt 2 of 2" in done.stderr
    assert done.stderr.splitlines()[-1] == "[rank0]: OSError: never works"


def test_a_program_that_cannot_be_started(tmp_path: Path) -> None:
    program = script(tmp_path, "not a program", "broken")
    program.chmod(0o755)
    done = run("--no_python", "--num_processes", "2", program)
    assert done.returncode == 1
    assert done.stderr.startswith("paceline launch: rank 0 could not be started: ")


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_host_that_allows_no_more_open_files(tmp_path: Path, method: str) -> None:
    job = script(tmp_path, "import time\ntime.sleep(300)")
    launch = shlex.join(command("--num_processes=16", f"--start_method={method}", job))
    done = subprocess.run(
        ["sh", "-c", f"ulimit -n 40; exec {launch}"],
        env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "paceline launch: the launcher cannot go on: Too many open files. Allow more open files, some "
        "five for each rank (`ulimit -n`); it is 40 now\n"
    )


def test_a_host_that_allows_no_more_processes(tmp_path: Path) -> None:
    scarce = tmp_path / "scarce"
    scarce.mkdir()
    script(
        scarce,
        "import os\ndef fork(): raise BlockingIOError(11, 'no more')\nos.fork = fork",
        "sitecustomize.py",
    )
    done = run(script(tmp_path, "print('never')"), PYTHONPATH=f"{scarce}:{SOURCE}")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(
        r"paceline launch: .*Allow more processes and threads \(`ulimit -u`\).*\n", done.stderr
    )


def test_a_folder_for_logs_that_cannot_be_made_is_told_before_anything_starts(tmp_path: Path) -> None:
    done = run("--log_dir=/proc/nowhere", script(tmp_path, "print('never')"))
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(
        r"paceline launch: the folder '/proc/nowhere/.*' cannot be made: .*--log_dir\n", done.stderr
    )


def test_other_signals_reach_the_ranks_which_go_on(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        """
import os, signal, time
rank, folder, came = os.environ["RANK"], os.environ["FOLDER"], []
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: came.append(number))
open(f"{folder}/ready_{rank}", "w").close()
while len(came) < 2: time.sleep(0.02)
print("came", *sorted(came))
""",
    )
    with started("--num_processes", "2", job, FOLDER=str(tmp_path)) as launch:
        wait_for([tmp_path / "ready_0", tmp_path / "ready_1"], launch)
        launch.send_signal(signal.SIGUSR1)
        launch.send_signal(signal.SIGUSR2)
        out, err = launch.communicate(timeout=LIMIT)
    assert (launch.returncode, err) == (0, "")
    assert sorted(out.splitlines()) == ["[rank0]: came 10 12", "[rank1]: came 10 12"]


def test_the_grace_before_sigkill_can_be_chosen(tmp_path: Path) -> None:
    tidy = """
import signal, time
def tidy_up(*_):
    time.sleep(4)
    open(folder + "/tidied", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, tidy_up)
open(f"{folder}/ready_{rank}", "w").close()
while True: time.sleep(1)
"""
    job = script(tmp_path, FAMILY + tidy)
    with started("--shutdown_timeout=0", job, FOLDER=str(tmp_path)) as launch:
        wait_for([tmp_path / "ready_0"], launch)
        launch.terminate()
        launch.communicate(timeout=LIMIT)
    assert launch.returncode == 143
    assert not (tmp_path / "tidied").exists()
    assert still_alive(pids_in(tmp_path), within=0) == []


LOST_A_PEER = "raise RuntimeError('Connection closed by peer')\n"


@pytest.mark.parametrize(
    ("ending", "last"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", "rank 1 was stopped (SIGSTOP"),
        ("sys.exit(0)", "rank 1 ended its script (exit code 0) while others still communicated"),
    ],
)
def test_who_is_missing_is_blamed_and_not_who_waited(tmp_path: Path, ending: str, last: str) -> None:
    away = f'if rank == "1":\n    {ending}\ntime.sleep(0.5)\n'
    job = script(tmp_path, "import signal\n" + FAMILY + away + LOST_A_PEER)
    done = run("--num_processes", "2", job, FOLDER=str(tmp_path))
    assert done.returncode == 1
    assert last in last_lines(done, 1)
    assert "paceline launch: rank 1 failed first" in done.stderr
    assert still_alive(pids_in(tmp_path), within=0) == []


def test_quiet_shows_the_first_failures_own_words_alone(tmp_path: Path) -> None:
    text = "import os, time\nif os.environ['RANK'] == '1': raise KeyError('mine')\ntime.sleep(300)"
    done = run("--quiet", "--num_processes=2", script(tmp_path, text))
    assert done.returncode == 1
    assert "paceline launch:" not in done.stderr
    assert done.stderr.splitlines()[-1] == "[rank1]: KeyError: 'mine'"
