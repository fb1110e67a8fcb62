"""Files and folders appear whole or not at all, whatever interrupts the writing."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import save
from paceline.checkpoint.atomic import (
    remove_folder,
    remove_leftovers,
    whole_file,
    whole_files,
    whole_folder,
)

WRITER = """
import sys, torch
from paceline.checkpoint import save
for step in range(1, 100000):
    save({"step": step, "w": torch.full((1 << 20,), float(step))}, sys.argv[1])
    print(step, flush=True)
"""


def test_saves_what_torch_loads(tmp_path: Path) -> None:
    save({"a": torch.arange(3)}, tmp_path / "x.pt")
    assert torch.equal(torch.load(tmp_path / "x.pt")["a"], torch.arange(3))
    assert os.listdir(tmp_path) == ["x.pt"]


def test_has_the_mode_of_other_files(tmp_path: Path) -> None:
    save(1, tmp_path / "ours.pt")
    torch.save(1, tmp_path / "theirs.pt")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ours.pt", "theirs.pt")}
    assert len(modes) == 1


def test_the_mode_of_a_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    save(1, path)
    path.chmod(0o640)
    save(2, path)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    folder, link = tmp_path / "step-5", tmp_path / "latest.pt"
    folder.mkdir()
    link.symlink_to("step-5/model.pt")
    for value in (1, 2):
        save(value, link)
        assert link.is_symlink()
        assert torch.load(folder / "model.pt") == value
    assert sorted(tmp_path.rglob("*")) == [link, folder, folder / "model.pt"]


def test_a_path_that_cannot_be_written_is_named_before_anything_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"folder for the file is not there: '{tmp_path}/none'"):
        save(1, tmp_path / "none" / "model.pt")
    with pytest.raises(IsADirectoryError, match=f"'{tmp_path}'"):
        save(1, tmp_path)
    assert not list(tmp_path.iterdir())


def save_with_no_room(path: Path, elements: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    save(torch.ones(elements), path)


@pytest.mark.parametrize("elements", [12_400, 200_000], ids=["at its end", "early"])
def test_no_room_is_an_oserror_that_names_the_file(tmp_path: Path, elements: int) -> None:
    path = tmp_path / "model.pt"
    save("old", path)
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        error = process.submit(save_with_no_room, path, elements).exception(60)
    assert isinstance(error, OSError)
    assert (error.errno, error.filename) == (errno.EFBIG, str(path))
    assert torch.load(path) == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    save("old", tmp_path / "x.pt")
    with pytest.raises(Exception, match="pickle"):
        save(lambda: None, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt") == "old"
    assert os.listdir(tmp_path) == ["x.pt"]


def test_an_open_file_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "x", "wb") as file, pytest.raises(ValueError, match="file name"):
        save(1, file)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
def test_killed_while_saving_the_file_is_old_or_new(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "x.pt"
    command = [sys.executable, "-c", WRITER, str(path)]
    source = Path(__file__).parents[2] / "src"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(source)}
    ) as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        time.sleep(random.Random(seed).uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
    state = torch.load(path)
    assert state["step"] >= 3
    assert (state["w"] == state["step"]).all()


def test_a_folder_takes_its_name_at_the_end(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "checkpoint-1") as aside:
        (aside / "file").write_text("new")
        assert not (tmp_path / "checkpoint-1").exists()
    assert (tmp_path / "checkpoint-1" / "file").read_text() == "new"
    with whole_folder(tmp_path / "checkpoint-1") as aside:
        (aside / "other").write_text("newer")
    assert os.listdir(tmp_path / "checkpoint-1") == ["other"]
    with pytest.raises(KeyError), whole_folder(tmp_path / "checkpoint-2"):
        raise KeyError
    assert os.listdir(tmp_path) == ["checkpoint-1"]


def test_files_join_those_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    (tmp_path / "b").write_text("old")
    with whole_files(tmp_path) as aside:
        (aside / "b").write_text("new")
        (aside / "sub").mkdir()
        (aside / "sub" / "c").write_text("new")
        assert (tmp_path / "b").read_text() == "old"
    assert (tmp_path / "a").read_text() == "old"
    assert (tmp_path / "b").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "sub"]


def test_leftovers_of_killed_writers_go(tmp_path: Path) -> None:
    (tmp_path / ".aside-checkpoint-3-abc").mkdir()
    (tmp_path / ".aside-mine-abc").mkdir()
    remove_leftovers(tmp_path, "checkpoint-")
    assert os.listdir(tmp_path) == [".aside-mine-abc"]


def test_what_is_being_written_is_no_leftover(tmp_path: Path) -> None:
    """Two runs may share a folder, and so may ranks of several machines."""
    with whole_folder(tmp_path / "checkpoint-4") as aside, whole_file(tmp_path / "x") as file:
        (aside / "file").write_text("new")
        file.write(b"new")
        remove_leftovers(tmp_path)
    assert (tmp_path / "checkpoint-4" / "file").read_text() == "new"
    assert (tmp_path / "x").read_text() == "new"
    with whole_folder(tmp_path / "checkpoint-5"):
        pass
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-4", "checkpoint-5", "x"]


def killed_while_writing(folder: Path) -> None:
    """A process that is killed in the middle of writing one of each kind."""
    pid = os.fork()
    if pid == 0:
        with (
            whole_folder(folder / "checkpoint-4") as first,
            whole_files(folder) as second,
            whole_file(folder / "x[1].pt") as third,
        ):
            (first / "file").write_text("new")
            (second / "file").write_text("new")
            third.write(b"new")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def write_file(folder: Path) -> None:
    save("new", folder / "x[1].pt")


def write_files(folder: Path) -> None:
    with whole_files(folder):
        remove_leftovers(folder)  # of another run: this one's are in use


@pytest.mark.parametrize(
    ("cleans", "left"),
    [
        (remove_leftovers, 0),
        (lambda folder: remove_leftovers(folder, "checkpoint-"), 2),
        (write_file, 2 + 1),  # and the file itself
        (write_files, 0),
    ],
)
def test_what_a_killed_process_was_writing_is_one(
    tmp_path: Path, cleans: Callable[[Path], None], left: int
) -> None:
    killed_while_writing(tmp_path)
    assert len(os.listdir(tmp_path)) == 3
    cleans(tmp_path)
    assert len(os.listdir(tmp_path)) == left


def test_two_may_write_one_folder(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "checkpoint-4") as first, whole_folder(tmp_path / "checkpoint-4") as second:
        (first / "file").write_text("first")
        (second / "file").write_text("second")
    assert (tmp_path / "checkpoint-4" / "file").read_text() == "first"  # its block was the last to end
    remove_folder(tmp_path / "checkpoint-4")
    remove_folder(tmp_path / "checkpoint-4")
    assert os.listdir(tmp_path) == []


def test_a_file_is_not_there_before_its_block_ends(tmp_path: Path) -> None:
    with whole_file(tmp_path / "x") as file:
        file.write(b"content")
        assert not (tmp_path / "x").exists()
    assert (tmp_path / "x").read_bytes() == b"content"
