"""Which checkpoints are complete, which is the newest, which go."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.checkpoint import contents, model_files
from paceline.checkpoint.atomic import whole_folder
from paceline.errors import CheckpointError


def make(output_dir: Path, step: int) -> Path:
    with whole_folder(output_dir / f"checkpoint-{step}") as aside:
        (aside / "weights").write_bytes(bytes(range(200)))
        (aside / "deep").mkdir()
        (aside / "deep" / "more").write_text("text")
        contents.seal(aside, step, world_size=2, progress={"loss": 0.5})
    return output_dir / f"checkpoint-{step}"


def test_a_sealed_folder_is_complete(tmp_path: Path) -> None:
    folder = make(tmp_path, 7)
    assert contents.flaw(folder) is None
    manifest = contents.read_manifest(folder)
    assert manifest is not None
    assert (manifest.step, manifest.world_size, manifest.progress) == (7, 2, {"loss": 0.5})
    assert set(manifest.files) == {"weights", "deep/more"}


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: os.truncate(folder / "weights", 100), "weights has 100 bytes instead of 200"),
        (lambda folder: flip_a_bit(folder / "weights"), "weights has the right size but other content"),
        (lambda folder: (folder / "deep" / "more").unlink(), "deep/more is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json"),
        (lambda folder: os.truncate(folder / "manifest.json", 20), "manifest.json cannot be read"),
    ],
)
def test_damage_is_seen_named_and_passed_over(tmp_path: Path, damage: object, words: str) -> None:
    make(tmp_path, 5)
    newest = make(tmp_path, 10)
    damage(newest)  # type: ignore[operator]
    search = contents.newest_complete(tmp_path)
    assert search.found == tmp_path / "checkpoint-5"
    ((folder, reason),) = search.skipped
    assert folder == newest
    assert words in reason


def test_steps_are_numbers(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        make(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / ".aside-checkpoint-200-x").mkdir()
    assert [contents.step_of(folder) for folder in contents.list_checkpoints(tmp_path)] == [9, 20, 100]
    assert contents.newest_complete(tmp_path / "nowhere").found is None


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [
        (None, None, [1, 2, 3, 4]),
        (2, None, [3, 4]),
        (2, 1, [1, 4]),
        (1, 1, [1, 4]),
        (1, 4, [4]),
        (9, None, [1, 2, 3, 4]),
    ],
)
def test_the_limit_spares_newest_and_best(
    tmp_path: Path, limit: int | None, best: int | None, left: list[int]
) -> None:
    for step in range(1, 5):
        make(tmp_path, step)
    contents.keep_newest(tmp_path, limit, best and tmp_path / f"checkpoint-{best}")
    assert [contents.step_of(folder) for folder in contents.list_checkpoints(tmp_path)] == left


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.tensor(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_weights_come_back_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    model, other = Tied().to(dtype), Tied().to(dtype)
    model_files.save_model(model, tmp_path)
    model_files.load_model(other, tmp_path)
    assert (tmp_path / "pytorch_model.bin").exists() is dtype.is_complex
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
    assert other.second.weight is other.first.weight


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    model_files.save_model(nn.Sequential(nn.Linear(2, 2)), tmp_path)
    with pytest.raises(CheckpointError, match=r"missing \['1.bias', '1.weight'\]"):
        model_files.load_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), tmp_path)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        model_files.load_model(nn.Sequential(nn.Linear(2, 3)), tmp_path)
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor pytorch_model.bin"):
        model_files.load_model(nn.Linear(2, 2), tmp_path / "nowhere")


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that is used without root's privileges, for which no folder is closed."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        before = os.geteuid()
        os.seteuid(before or 65534)  # nobody
        try:
            yield Path(folder)
        finally:
            os.seteuid(before)


@pytest.mark.parametrize("closed", ["checkpoint-10", "checkpoint-10/manifest.json", "checkpoint-10/weights"])
def test_what_cannot_be_read_is_named_and_passed_over(shared_folder: Path, closed: str) -> None:
    make(shared_folder, 5)
    make(shared_folder, 10)
    os.chmod(shared_folder / closed, 0)
    search = contents.newest_complete(shared_folder)
    assert search.found == shared_folder / "checkpoint-5"
    ((_, reason),) = search.skipped
    assert "cannot be read" in reason
    assert "Permission denied" in reason
    os.chmod(shared_folder / closed, 0o700)


def test_what_cannot_be_deleted_stays_and_stops_nobody(
    shared_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (5, 10, 15):
        make(shared_folder, step)
    os.chmod(shared_folder / "checkpoint-5", 0o500)
    assert contents.keep_newest(shared_folder, 1, None) == [shared_folder / "checkpoint-10"]
    assert "checkpoint-5 cannot be deleted, so it stays" in caplog.text
    assert sorted(os.listdir(shared_folder)) == ["checkpoint-15", "checkpoint-5"]
    os.chmod(shared_folder / "checkpoint-5", 0o700)
