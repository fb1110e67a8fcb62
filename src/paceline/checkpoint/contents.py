"""What is in a checkpoint folder, and which folder is the newest complete one.

    output_dir/
      checkpoint-500/
        model.safetensors      (or what the model's save_pretrained writes)
        optimizer.pt  scheduler.pt  trainer_state.json  training_args.bin
        manifest.json          written last: the step, the world size, and of every
                               other file its size and SHA-256

A folder is complete when its manifest is there and every file is as the manifest
says. The files have Hugging Face's names and formats.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoint.atomic import remove_folder, write_text
from paceline.errors import CheckpointError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1

_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass
class Manifest:
    """The inventory of one checkpoint.

    Attributes:
        step: optimizer steps done.
        world_size: ranks that trained.
        files: relative name -> {"bytes": size, "sha256": hexadecimal digest}.
        progress: whatever else the trainer needs to go on (numbers and strings only).
        format: version of this file's layout.
    """

    step: int
    world_size: int
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT


@dataclass(frozen=True)
class Search:
    """What a search for the newest complete checkpoint came to.

    Attributes:
        found: its folder, or None.
        skipped: (folder, reason) of each newer one that is not complete, newest first.
    """

    found: Path | None
    skipped: tuple[tuple[Path, str], ...]


def seal(folder: Path, step: int, world_size: int, progress: dict[str, Any]) -> None:
    """Write the manifest over what lies in `folder`."""
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _digest(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = Manifest(step=step, world_size=world_size, files=files, progress=progress)
    write_text(folder / MANIFEST, json.dumps(asdict(manifest), indent=2, sort_keys=True) + "\n")


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of `folder`; None if it has none.

    Raises:
        CheckpointError: it is there but cannot be read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = Manifest(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if manifest.format > FORMAT:
        raise CheckpointError(f"{path} has format {manifest.format}; this version reads up to {FORMAT}")
    return manifest


def flaw(folder: Path) -> str | None:
    """Why `folder` is not a complete checkpoint that can be read, naming the file; None if it is one."""
    try:
        return _first_flaw(folder)
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"it cannot be read ({error})"


def _first_flaw(folder: Path) -> str | None:
    manifest = read_manifest(folder)
    if manifest is None:
        return f"it has no {MANIFEST}, so it was not finished or was not written by paceline"
    for name, facts in manifest.files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != facts["bytes"]:
            return f"{name} has {size} bytes instead of {facts['bytes']}"
        if _digest(path) != facts["sha256"]:
            return f"{name} has the right size but other content than was written"
    return None


def list_checkpoints(output_dir: Path) -> list[Path]:
    """The folders named checkpoint-N, lowest N first."""
    if not output_dir.is_dir():
        return []
    found = [path for path in output_dir.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    """N of a folder named checkpoint-N."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        raise CheckpointError(f"{folder} is not named checkpoint-N")
    return int(match.group(1))


def newest_complete(output_dir: Path) -> Search:
    """Find the complete checkpoint with the highest step."""
    skipped: list[tuple[Path, str]] = []
    for folder in reversed(list_checkpoints(output_dir)):
        reason = flaw(folder)
        if reason is None:
            return Search(folder, tuple(skipped))
        skipped.append((folder, reason))
    return Search(None, tuple(skipped))


def keep_newest(output_dir: Path, limit: int | None, best: Path | None) -> list[Path]:
    """Delete the oldest checkpoints until `limit` are left; `best` is never deleted.

    Returns:
        the folders that were deleted; what cannot be deleted stays, with a warning.
    """
    if limit is None or limit <= 0:
        return []
    kept = list_checkpoints(output_dir)
    protected = {kept[-1]} if kept else set()
    if best is not None:
        protected |= {folder for folder in kept if folder.resolve() == best.resolve()}
    surplus = len(kept) - max(limit, len(protected))
    return _removed([folder for folder in kept if folder not in protected][: max(surplus, 0)])


def keep_only(best: Path) -> list[Path]:
    """Delete all checkpoints beside `best`, if it is there; returns the folders that were deleted."""
    found = list_checkpoints(best.parent)
    others = [folder for folder in found if folder.resolve() != best.resolve()]
    return _removed(others if len(others) < len(found) else [])


def _removed(doomed: list[Path]) -> list[Path]:
    """Delete folders; returns those that could be. A checkpoint too many is no reason to stop training."""
    gone = []
    for folder in doomed:
        try:
            remove_folder(folder)
            gone.append(folder)
        except OSError as error:
            logger.warning("%s cannot be deleted, so it stays: %s", folder, error)
    return gone


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
