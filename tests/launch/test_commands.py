"""`paceline test`, `paceline env` and `paceline config`, as a user calls them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.launching import LIMIT, environment


def paceline(*words: str, answers: str = "", **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        env=environment(**extra),
        input=answers,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@pytest.mark.slow
def test_test_trains_on_what_launch_would_start() -> None:
    done = paceline("test", "--cpu", "--num_processes=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[rank0]: paceline test: ok: 2 rank(s) on cpu")
    assert "bit-identical" in done.stdout


def test_the_help_of_test_is_its_own() -> None:
    done = paceline("test", "--help")
    assert done.stdout.startswith("usage: paceline test [options of paceline launch]\n")
    assert "--num_processes N" in done.stdout and "`paceline test --help_all`" in done.stdout
    assert "train.py" not in done.stdout


def test_env_prints_what_a_bug_report_needs() -> None:
    done = paceline("env", OMP_NUM_THREADS="1", SECRET_TOKEN="hunter2")
    assert done.returncode == 0, done.stderr
    lines = (line.partition(" ") for line in done.stdout.splitlines())
    said = {name: value.strip() for name, _, value in lines}  # a variable may be set to nothing
    assert said["torch"].startswith("2.") and said["OMP_NUM_THREADS"] == "1"
    assert " serves, because " in said["backend"] and said["kernel"]
    assert {"paceline", "python", "system", "host", "cores", "memory", "devices"} <= set(said)
    assert "hunter2" not in done.stdout


def test_config_writes_the_file_that_launch_reads(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    done = paceline("config", "--config_file", str(path), answers="1\n3\nno\n")
    assert (done.returncode, path.exists()) == (0, True), done.stderr
    (tmp_path / "job.py").write_text("import os\nprint(os.environ['WORLD_SIZE'])")
    words = ["launch", "--config_file", str(path), "--log_rank_0_only", str(tmp_path / "job.py")]
    assert paceline(*words).stdout == "3\n"
    done = paceline("config", "--config_file", str(tmp_path / "other.yaml"), answers="1\n")
    assert done.returncode == 2 and "nothing was written" in done.stderr
    assert not (tmp_path / "other.yaml").exists()


@pytest.mark.parametrize("words", [["env", "--bogus"], ["config", "--bogus"], ["test", "--bogus"]])
def test_unknown_options_are_refused(words: list[str]) -> None:
    done = paceline(*words)
    assert done.returncode == 2 and "there is no option --bogus" in done.stderr


def test_ctrl_c_while_the_command_is_being_imported_ends_it_quietly() -> None:
    text = """
import sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == "paceline.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from paceline.__main__ import main
sys.exit(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", text],
        env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
