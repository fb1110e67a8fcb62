"""Each example runs as it stands, alone and under the launcher, and learns what it says it learns."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT = 150  # seconds for one run, on a machine that does other things as well

pytestmark = pytest.mark.timeout(2 * LIMIT + 20)


def run(example: str, ranks: int, folder: Path, *arguments: str) -> str:
    """What the example prints with that many ranks; 1 is without the launcher."""
    launcher = ["-m", "paceline", "launch", "--cpu", "--num_processes", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, str(EXAMPLES / example), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=LIMIT)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # the launcher's own ranks go with it
            raise
    assert process.returncode == 0, err[-3000:]
    return out


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


def summary(text: str) -> list[float]:
    """The losses in charlm's last line."""
    (line,) = re.findall(r"loss every \d+ steps: ([\d. ]+)", text)
    return [float(loss) for loss in line.split()]


def test_bare_loop_is_the_same_on_one_rank_and_two(tmp_path: Path) -> None:
    alone = run("bare_loop.py", 1, tmp_path)
    together = run("bare_loop.py", 2, tmp_path)
    (accuracy,) = numbers(r"held-out digits: ([\d.]+)%", together)
    assert accuracy >= 96
    losses = numbers(r"loss ([\d.]+)", alone)
    assert len(losses) == 12
    # Printed to 4 digits; rounding differs, as sums are made in another order.
    assert numbers(r"loss ([\d.]+)", together) == pytest.approx(losses, abs=2e-3)


@pytest.mark.slow
def test_digits_reads_held_out_digits_and_leaves_its_files(tmp_path: Path) -> None:
    text = run("digits.py", 2, tmp_path, "--output_dir", str(tmp_path / "out"))
    (accuracy,) = numbers(r"held-out digits: ([\d.]+)%", text)
    assert accuracy >= 97
    assert list((tmp_path / "out").glob("checkpoint-*/*"))
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    losses = [
        entry["loss"] for entry in json.loads((tmp_path / "out" / "log.json").read_text()) if "loss" in entry
    ]
    assert losses[-1] < losses[0] / 5


@pytest.mark.slow
def test_charlm_gives_the_same_losses_on_one_rank_and_two(tmp_path: Path) -> None:
    steps = ("--max_steps", "20", "--logging_steps", "5")
    alone = run("charlm.py", 1, tmp_path, "--per_device_train_batch_size", "8", *steps)
    together = run("charlm.py", 2, tmp_path, "--per_device_train_batch_size", "4", *steps)
    losses = summary(alone)
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert summary(together) == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_examples_stay_short(example: str) -> None:
    assert len((EXAMPLES / example).read_text().splitlines()) < 100
