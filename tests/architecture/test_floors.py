"""Lower floors never import upper ones; rooms of floors 3 and 4 never import each other."""

from __future__ import annotations

import sys
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.architecture.house import FLOORS, SOURCE, Import, files, imports, is_package, module_name, room

# What the launcher may take from outside the standard library: it runs where no model is, and starts quickly.
LAUNCHER_MAY = ("torch.distributed", "yaml")


def own_imports() -> list[Import]:
    return [found for path in files() for found in imports(path) if found.module.split(".")[0] == "paceline"]


def test_every_file_has_a_floor() -> None:
    homeless = [str(path.relative_to(SOURCE)) for path in files() if room(module_name(path)) not in FLOORS]
    assert not homeless


def test_imports_never_go_up() -> None:
    wrong = []
    for found in own_imports():
        here, there = room(module_name(found.path)), room(found.target)
        if FLOORS[there] > FLOORS[here]:
            wrong.append(
                f"{found.place}: floor {FLOORS[here]} imports {found.target} of floor {FLOORS[there]}"
            )
    assert not wrong, "\n".join(wrong)


def test_rooms_of_one_floor_are_strangers() -> None:
    wrong = []
    for found in own_imports():
        here, there = room(module_name(found.path)), room(found.target)
        if here != there and FLOORS[here] == FLOORS[there] and FLOORS[here] in (3, 4):
            wrong.append(f"{found.place}: {here}/ imports {found.target}")
    assert not wrong, "\n".join(wrong)


def test_the_launcher_stands_on_floor_0_diagnose_and_torch_distributed() -> None:
    wrong = []
    for path in files():
        if room(module_name(path)) not in ("launch", "diagnose"):
            continue
        for found in imports(path):
            top = found.module.split(".")[0]
            place = room(found.target)
            inside = top == "paceline" and (place in ("launch", "diagnose") or FLOORS[place] == 0)
            allowed = f"{found.module}.{found.name or ''}.".startswith(tuple(f"{m}." for m in LAUNCHER_MAY))
            in_the_server = (
                path.name == "fork_server.py" and top in ("torch", "numpy") and not found.on_import
            )
            if not (inside or top in sys.stdlib_module_names or allowed or in_the_server):
                wrong.append(f"{found.place}: {found.module}")
    assert not wrong, "\n".join(wrong)


def test_names_come_from_the_file_that_defines_them() -> None:
    """Never from `paceline` itself, and never through a room's __init__."""
    wrong = [
        f"{found.place}: from {found.module} import {found.name}"
        for found in own_imports()
        if is_package(found.target) and found.path.name != "__init__.py"
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles() -> None:
    graph: dict[str, set[str]] = {}
    for found in own_imports():
        if found.on_import:
            graph.setdefault(module_name(found.path), set()).add(found.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
