"""The public names are those listed here, each exists, and each says what it is."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import paceline
import paceline.checkpoint
import paceline.errors
from tests.architecture.house import SOURCE, files, module_name, tree

# A name added here is a promise; a name removed breaks somebody's program.
PUBLIC = {
    "ArgumentError",
    "ArgumentParser",
    "BackendUnavailableError",
    "CheckpointError",
    "CollectiveTimeoutError",
    "CommunicationError",
    "DistributedDataParallel",
    "DistributedSampler",
    "GradientError",
    "GraphChangedError",
    "LaunchError",
    "NonFiniteError",
    "PacelineError",
    "PeerFailedError",
    "PeerLostError",
    "RanksOutOfStepError",
    "ReplicaMismatchError",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "SyncBatchNorm",
    "Trainer",
    "TrainerCallback",
    "TrainingArguments",
    "UnusedParametersError",
    "verify_replicas",
}


def test_public_names_are_frozen() -> None:
    assert set(paceline.__all__) == PUBLIC


def test_public_names_exist_and_are_listed() -> None:
    for name in PUBLIC:
        assert getattr(paceline, name).__name__ == name
        assert name in dir(paceline)


def test_every_error_can_be_caught_by_its_public_name() -> None:
    errors = {name for name, value in vars(paceline.errors).items() if isinstance(value, type)}
    assert errors <= PUBLIC


def test_checkpoint_save_is_public() -> None:
    assert callable(paceline.checkpoint.save)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(paceline, "NoSuchName")


def test_python_dash_m_is_the_command() -> None:
    """`python -m paceline` names itself and its commands."""
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "--help"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "launch" in done.stdout


def test_every_file_and_public_name_has_a_docstring() -> None:
    missing = [name for path in files() for name in undocumented(path)]
    assert not missing, "without docstring:\n" + "\n".join(missing)


def undocumented(path: Path) -> list[str]:
    """Of a file: itself, its public classes and functions, and their public methods."""
    missing = [] if ast.get_docstring(tree(path)) else [str(path.relative_to(SOURCE))]
    for node in tree(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            if ast.get_docstring(node) is None:
                missing.append(f"{module_name(path)}.{node.name}")
            if isinstance(node, ast.ClassDef):
                missing += [
                    f"{module_name(path)}.{node.name}.{method}" for method in bare_methods(path, node)
                ]
    return missing


def bare_methods(path: Path, node: ast.ClassDef) -> list[str]:
    """Public methods undocumented here, in what they override, and in a protocol of that file."""
    cls = getattr(importlib.import_module(module_name(path)), node.name)
    bare = [name for name, method in public_methods(node) if not ast.get_docstring(method)]
    said = {
        name
        for protocol in tree(path).body
        if isinstance(protocol, ast.ClassDef) and "Protocol" in map(ast.unparse, protocol.bases)
        for name, method in public_methods(protocol)
        if ast.get_docstring(method)
    }
    return [
        name for name in bare if name not in said and not inspect.getdoc(inspect.getattr_static(cls, name))
    ]


def public_methods(node: ast.ClassDef) -> list[tuple[str, ast.FunctionDef]]:
    return [(m.name, m) for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")]
