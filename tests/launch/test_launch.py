"""Launches that go well, or are refused: what is started, with which place, and where its output goes."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import socket
import subprocess
from pathlib import Path

import pytest

from tests.launch.launching import LIMIT, command, environment, run, script, started

ENVIRONMENT = """
import json, os, sys
place = os.path.join(os.environ["FOLDER"], os.environ["RANK"] + ".json")
with open(place, "w") as file:
    json.dump({"arguments": sys.argv[1:], **os.environ}, file)
"""
ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
dist.barrier()
print("sum", total.item())
dist.destroy_process_group()
"""


def places(folder: Path, ranks: int) -> list[dict[str, str]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def test_ranks_see_their_place_and_get_the_scripts_arguments(tmp_path: Path) -> None:
    job = script(tmp_path, ENVIRONMENT)
    done = run("--num_processes", "2", "--cpu", job, "--num_processes", "9", "--", "-x", FOLDER=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    seen = places(tmp_path, 2)
    for rank in range(2):
        assert seen[rank]["arguments"] == ["--num_processes", "9", "--", "-x"]
        assert (seen[rank]["RANK"], seen[rank]["LOCAL_RANK"], seen[rank]["WORLD_SIZE"]) == (
            f"{rank}",
            f"{rank}",
            "2",
        )
        assert (seen[rank]["MASTER_ADDR"], seen[rank]["ACCELERATE_USE_CPU"]) == ("127.0.0.1", "true")
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"]
    assert seen[0]["TORCHELASTIC_RUN_ID"] == seen[1]["TORCHELASTIC_RUN_ID"]
    assert not Path(seen[0]["TORCHELASTIC_ERROR_FILE"]).parent.exists()


def test_a_module(tmp_path: Path) -> None:
    script(tmp_path, ENVIRONMENT, "my_job.py")
    done = run(
        "-m", "my_job", "a", FOLDER=str(tmp_path), PYTHONPATH=f"{tmp_path}:{environment()['PYTHONPATH']}"
    )
    assert done.returncode == 0, done.stderr
    assert places(tmp_path, 1)[0]["arguments"] == ["a"]


def test_a_program_that_is_not_python(tmp_path: Path) -> None:
    done = run("--no_python", "--num_processes=2", "sh", "-c", 'echo "I am $RANK of $WORLD_SIZE"')
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank0]: I am 0 of 2", "[rank1]: I am 1 of 2"]


def test_the_named_port_is_used_and_a_taken_one_refused(tmp_path: Path) -> None:
    job = script(tmp_path, ENVIRONMENT)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = run("--main_process_port", port, job, FOLDER=str(tmp_path))
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"paceline launch: port {port} on 127.0.0.1 cannot be used")
    assert "--main_process_port" in refused.stderr
    assert not list(tmp_path.glob("*.json"))
    assert run("--main_process_port", port, job, FOLDER=str(tmp_path)).returncode == 0
    assert places(tmp_path, 1)[0]["MASTER_PORT"] == port


@pytest.mark.slow
def test_two_launches_at_once(tmp_path: Path) -> None:
    job = script(tmp_path, ALL_REDUCE)
    with started("--num_processes", "2", job) as one, started("--num_processes", "2", job) as other:
        for launch in (one, other):
            out, err = launch.communicate(timeout=LIMIT)
            assert sorted(out.splitlines()) == ["[rank0]: sum 3.0", "[rank1]: sum 3.0"], err
            assert launch.returncode == 0


MEET_ELSEWHERE = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
def meet(rank, world_size, port, way):
    if way == "environment":
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port)
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    else:
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    total = torch.ones(1) * (rank + 1)
    dist.all_reduce(total)
    sys.stdout.write(f"sum {total.item()}\\n")
    dist.destroy_process_group()
if __name__ == "__main__":
    port, way = sys.argv[1:]
    if os.environ["WORLD_SIZE"] == "1":
        mp.spawn(meet, (2, port, way), nprocs=2)
    else:
        meet(int(os.environ["RANK"]), 2, port, way)
"""


@pytest.mark.parametrize("way", ["environment", pytest.param("url", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ranks_meet_where_they_like(tmp_path: Path, way: str, ranks: int) -> None:
    """One rank that starts two itself, or two, at an address that is not the launcher's."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    done = run(f"--num_processes={ranks}", script(tmp_path, MEET_ELSEWHERE), port, way)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"sum (\S+)", done.stdout) == ["3.0", "3.0"]


@pytest.mark.skipif(
    subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode != 0,
    reason="may not name a machine of its own",
)
def test_a_machine_whose_name_does_not_resolve(tmp_path: Path) -> None:
    job = script(tmp_path, ALL_REDUCE)
    rename = ["unshare", "--uts", "sh", "-c", 'hostname no-such-host.invalid && exec "$@"', "sh"]
    done = subprocess.run(
        [*rename, *command("--num_processes", "2", job)],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[rank0]: sum 3.0", "[rank1]: sum 3.0"]


def test_lines_of_many_ranks_in_one_pipe_are_whole(tmp_path: Path) -> None:
    job = script(tmp_path, "import os\nfor i in range(2000): print(f'<{i}:' + 'x' * 90 + '>')\nos._exit(0)")
    done = run("--num_processes", "3", job)
    lines = done.stdout.splitlines()
    assert all(re.fullmatch(r"\[rank[012]\]: <\d+:x{90}>", line) for line in lines)
    for rank in range(3):
        mine = [int(re.findall(r"<(\d+):", line)[0]) for line in lines if line.startswith(f"[rank{rank}]")]
        assert mine == list(range(2000))


def test_one_rank_prints_as_if_there_were_no_launcher(tmp_path: Path) -> None:
    job = script(tmp_path, "import sys\nsys.stdout.write('\\rbar\\rdone'); print('error', file=sys.stderr)")
    done = subprocess.run(command(job), env=environment(), capture_output=True, timeout=LIMIT, check=False)
    assert (done.stdout, done.stderr) == (b"\rbar\rdone", b"error\n")


SPEAK = """
import os, sys
print("out", os.environ["RANK"])
print("error", os.environ["RANK"], file=sys.stderr)
"""


def logs(folder: Path) -> dict[str, str]:
    """Every log by its path below the folder of the run."""
    return {"/".join(path.parts[-3:]): path.read_text() for path in folder.rglob("*.log")}


def test_log_dir_keeps_all_output_beside_the_screen(tmp_path: Path) -> None:
    job, folder = script(tmp_path, SPEAK), tmp_path / "logs"
    for _ in range(2):  # each run has a folder of its own
        done = run("--num_processes", "2", "--log_dir", folder, job)
        assert sorted(done.stdout.splitlines()) == ["[rank0]: out 0", "[rank1]: out 1"]
        assert sorted(done.stderr.splitlines()) == ["[rank0]: error 0", "[rank1]: error 1"]
    runs = list(folder.iterdir())
    assert len(runs) == 2
    for one in runs:
        assert logs(one) == {
            "attempt_0/0/stdout.log": "out 0\n",
            "attempt_0/0/stderr.log": "error 0\n",
            "attempt_0/1/stdout.log": "out 1\n",
            "attempt_0/1/stderr.log": "error 1\n",
        }


def test_tee_chooses_streams_by_rank(tmp_path: Path) -> None:
    job, folder = script(tmp_path, SPEAK), tmp_path / "logs"
    done = run("--num_processes", "2", "--log_dir", folder, "--tee", "0:1,1:2", job)
    assert logs(folder) == {"attempt_0/0/stdout.log": "out 0\n", "attempt_0/1/stderr.log": "error 1\n"}
    assert sorted(done.stdout.splitlines()) == ["[rank0]: out 0", "[rank1]: out 1"]


def test_tee_alone_says_where_the_files_are(tmp_path: Path) -> None:
    done = run("--tee", "1", script(tmp_path, SPEAK), TMPDIR=str(tmp_path))
    assert done.stdout == "[rank0]: out 0\n"
    folder = re.findall(r"^paceline launch: the ranks' output is also in (.+)$", done.stderr, re.MULTILINE)[0]
    assert logs(Path(folder)) == {"attempt_0/0/stdout.log": "out 0\n"}


def test_redirects_keep_streams_off_the_screen(tmp_path: Path) -> None:
    job, folder = script(tmp_path, SPEAK), tmp_path / "logs"
    done = run("--num_processes", "2", "--log_dir", folder, "--redirects", "1", job)
    assert (done.stdout, sorted(done.stderr.splitlines())) == ("", ["[rank0]: error 0", "[rank1]: error 1"])
    assert logs(folder) == {"attempt_0/0/stdout.log": "out 0\n", "attempt_0/1/stdout.log": "out 1\n"}


def test_rank_0_alone_is_shown_as_if_it_were_alone_and_a_failure_of_others_too(tmp_path: Path) -> None:
    job = script(tmp_path, SPEAK + "if os.environ['RANK'] == '1': raise KeyError('mine')")
    done = run("--num_processes", "2", "--log_rank_0_only", "--log_dir", tmp_path / "logs", job)
    assert done.stdout == "out 0\n"
    assert done.stderr.startswith("error 0\npaceline launch: ")
    assert "\npaceline launch: rank 1 failed first" in done.stderr
    assert done.stderr.endswith("[rank1]: KeyError: 'mine'\n")
    assert logs(tmp_path)["attempt_0/1/stdout.log"] == "out 1\n"


def test_only_some_local_ranks_are_shown(tmp_path: Path) -> None:
    done = run("--num_processes", "3", "--local_ranks_filter=0,2", script(tmp_path, SPEAK))
    assert sorted(done.stdout.splitlines()) == ["[rank0]: out 0", "[rank2]: out 2"]


def test_a_configuration_file_is_used_and_the_command_line_wins(tmp_path: Path) -> None:
    home = tmp_path / "accelerate"
    home.mkdir()
    (home / "default_config.yaml").write_text(
        "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 3\nmixed_precision: bf16\n"
    )
    text = "import os\nprint(os.environ['WORLD_SIZE'], os.environ['ACCELERATE_MIXED_PRECISION'])"
    for words, shown in (([], "[rank0]: 3 bf16"), (["--num_processes=2"], "[rank0]: 2 bf16")):
        done = run(*words, "--local_ranks_filter=0", script(tmp_path, text), HF_HOME=str(tmp_path))
        assert done.stdout.splitlines() == [shown], done.stderr


def test_on_a_terminal_rank_0_has_one_too(tmp_path: Path) -> None:
    job = script(
        tmp_path, "import os, sys\nprint(os.environ['RANK'], sys.stdout.isatty(), sys.stderr.isatty())"
    )
    terminal, far_end = pty.openpty()
    with subprocess.Popen(
        command("--num_processes", "2", job), env=environment(), stdin=far_end, stdout=far_end, stderr=far_end
    ) as process:
        os.close(far_end)
        shown = _read_all(terminal)
        assert process.wait(LIMIT) == 0
    assert sorted(shown.split()) == sorted(b"0 True True [rank1]: 1 False False".split())


def _read_all(terminal: int) -> bytes:
    """What was shown on a pseudo-terminal until its last user left, which reading reports as an error."""
    shown = b""
    with open(terminal, "rb", buffering=0) as screen:
        try:
            while data := screen.read(4096):
                shown += data
        except OSError:
            pass
    return shown


@pytest.mark.parametrize("closed", ["<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_as_good_as_empty_ones(tmp_path: Path, closed: str) -> None:
    text = "import os\nprint('said')\nopen(os.environ['FOLDER'] + '/ran_' + os.environ['RANK'], 'w').close()"
    words = shlex.join(command("--num_processes=2", script(tmp_path, text)))
    done = subprocess.run(
        ["sh", "-c", f"{words} {closed}"],
        env=environment(FOLDER=str(tmp_path)), capture_output=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("ran_*")) == ["ran_0", "ran_1"]
