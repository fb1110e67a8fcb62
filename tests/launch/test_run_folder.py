"""What a failed run leaves is kept for a while, and does not pile up."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.launch.run_folder import PREFIX, RunFolder, remove_old


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def left_behind(temporary: Path, name: str, days: float) -> Path:
    folder = temporary / f"{PREFIX}{name}"
    (folder / "attempt_0").mkdir(parents=True)
    changed = time.time() - days * 24 * 3600
    os.utime(folder, (changed, changed))
    return folder


def test_a_folder_goes_unless_it_is_to_be_kept(temporary: Path) -> None:
    with RunFolder(None) as mine:
        (mine.path / "attempt_0").mkdir()
    assert list(temporary.iterdir()) == []
    with RunFolder(None) as mine:
        mine.keep = True
    assert list(temporary.iterdir()) == [mine.path]


def test_the_users_folder_stays(temporary: Path) -> None:
    named = temporary / "logs" / "run"
    with RunFolder(named) as mine:
        assert mine.path == named
    assert named.is_dir()


def test_old_ones_are_removed_by_the_next_launch(temporary: Path) -> None:
    old, young = left_behind(temporary, "old", 8), left_behind(temporary, "young", 6)
    strangers = left_behind(temporary, "x", 100).rename(temporary / "other-run-x")
    (temporary / f"{PREFIX}file").touch()
    with RunFolder(None):
        pass
    assert not old.exists()
    assert young.exists() and strangers.exists() and (temporary / f"{PREFIX}file").exists()


def test_only_so_many_of_the_newest_stay(temporary: Path) -> None:
    folders = [left_behind(temporary, str(number), number / 10) for number in range(5)]
    remove_old(temporary, more_than=3)
    assert [folder.exists() for folder in folders] == [True, True, True, False, False]


def test_a_folder_whose_launcher_lives_stays_however_old(temporary: Path) -> None:
    with RunFolder(None) as mine:
        os.utime(mine.path, (0, 0))
        remove_old(temporary)
        assert mine.path.exists()


def test_a_link_is_not_followed(temporary: Path) -> None:
    (temporary / "precious").mkdir()
    (temporary / f"{PREFIX}link").symlink_to("precious")
    remove_old(temporary, more_than=0)
    assert (temporary / "precious").exists() and (temporary / f"{PREFIX}link").is_symlink()


def test_no_place_for_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc/nowhere")
    with pytest.raises(LaunchError, match="TMPDIR"):
        RunFolder(None)
