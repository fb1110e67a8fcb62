"""Reads paceline's source: its files, their floors, and what they import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "paceline"

# File or folder of src/paceline -> floor. What is not listed has no place in the house.
FLOORS = {
    "errors": 0,
    "environment": 0,
    "recorder": 0,
    "comm": 1,
    "engine": 2,
    "optim": 3,
    "checkpoint": 3,
    "diagnose": 3,
    "train": 4,
    "launch": 4,
    "adapters": 4,
    "about": 5,
    "self_test": 5,
    "cli": 5,
    "__init__": 5,
    "__main__": 5,
}


@dataclass(frozen=True)
class Import:
    """One imported module, as `module` (and the name taken from it, if any), at a line of a file."""

    path: Path
    line: int
    module: str
    name: str | None
    on_import: bool  # executed when the file is imported: not inside a function, not for type checkers only

    @property
    def place(self) -> str:
        return f"{self.path.relative_to(SOURCE)}:{self.line}"

    @property
    def target(self) -> str:
        """The dotted name of the module that is really imported (a submodule taken by name counts)."""
        if self.name is not None and is_module(f"{self.module}.{self.name}"):
            return f"{self.module}.{self.name}"
        return self.module


@cache
def files() -> tuple[Path, ...]:
    """All Python files of the package."""
    return tuple(sorted(SOURCE.rglob("*.py")))


@cache
def tree(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(), filename=str(path))


def module_name(path: Path) -> str:
    """`paceline.engine.plan` for src/paceline/engine/plan.py."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    """Whether the dotted name is a file or folder of the package."""
    base = SOURCE.parent.joinpath(*name.split("."))
    return base.with_suffix(".py").is_file() or (base / "__init__.py").is_file()


def is_package(name: str) -> bool:
    """Whether the dotted name is a folder of the package."""
    return (SOURCE.parent.joinpath(*name.split(".")) / "__init__.py").is_file()


def room(name: str) -> str:
    """The file or folder right under paceline in which the dotted name lies."""
    return (name.split(".") + ["__init__"])[1]


def imports(path: Path) -> Iterator[Import]:
    """Everything the file imports anywhere, inside functions and for type checkers too."""
    yield from _imports(path, tree(path), on_import=True)


def _imports(path: Path, node: ast.AST, on_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(path, child.lineno, alias.name, None, on_import)
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                yield Import(path, child.lineno, child.module or "", alias.name, on_import)
        else:
            later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _for_types_only(
                child
            )
            yield from _imports(path, child, on_import and not later)


def _for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
