"""Rules that can be read off a single file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.house import SOURCE, files, tree

LONGEST_FILE = 450  # lines: about what a reader can hold
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}

# Calls that may run while a file is imported: they make a value and touch nothing.
HARMLESS = {
    "TypeVar",
    "ParamSpec",
    "namedtuple",
    "NewType",
    "dataclass",
    "field",
    "frozenset",
    "dict",
    "tuple",
    "set",
    "float",
    "auto",
    "Path",
    "timedelta",
    "MappingProxyType",
    "logging.getLogger",
    "re.compile",
    "struct.Struct",
    "contextvars.ContextVar",
    "dict.fromkeys",
    "operator.attrgetter",
    "torch.no_grad",  # as a decorator
    "option",  # train/arguments.py: a dataclass field with its help
}


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 0)}"


def test_environment_py_is_the_only_reader_of_the_environment() -> None:
    wrong = []
    for path in files():
        if path == SOURCE / "environment.py":
            continue
        for node in ast.walk(tree(path)):
            by_attribute = (
                isinstance(node, ast.Attribute)
                and node.attr in ENVIRONMENT_NAMES
                and isinstance(node.value, ast.Name)
                and node.value.id in ("os", "posix")
            )
            by_name = isinstance(node, ast.ImportFrom) and node.module in ("os", "posix")
            if by_attribute or (by_name and any(alias.name in ENVIRONMENT_NAMES for alias in node.names)):
                wrong.append(where(path, node))
    assert not wrong, "\n".join(wrong)


def test_no_global_statement() -> None:
    wrong = [
        where(path, node) for path in files() for node in ast.walk(tree(path)) if isinstance(node, ast.Global)
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_called_on_import() -> None:
    wrong = []
    for path in files():
        for call in calls_on_import(tree(path)):
            name = ast.unparse(call.func)
            of_a_literal = isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Constant)
            if not of_a_literal and name not in HARMLESS and name.rpartition(".")[2] not in HARMLESS:
                wrong.append(f"{where(path, call)}: {name}(...)")
    assert not wrong, "\n".join(wrong)


def test_files_fit_a_readers_head() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in files()}
    wrong = [
        f"{path.relative_to(SOURCE)}: {length}" for path, length in lengths.items() if length > LONGEST_FILE
    ]
    assert not wrong, f"longer than {LONGEST_FILE} lines: " + ", ".join(wrong)


def test_files_are_split_by_duty() -> None:
    nowhere = {"utils", "util", "helpers", "helper", "misc", "common"}
    wrong = [
        str(path.relative_to(SOURCE))
        for path in files()
        if path.stem in nowhere or path.parent.name in nowhere
    ]
    assert not wrong


def test_rooms_have_nothing_but_a_docstring_in_their_init() -> None:
    """Only the two public packages name anything there."""
    public = {SOURCE / "__init__.py", SOURCE / "checkpoint" / "__init__.py"}
    wrong = []
    for path in files():
        if path.name == "__init__.py" and path not in public:
            body = tree(path).body
            if len(body) != 1 or ast.get_docstring(tree(path)) is None:
                wrong.append(str(path.relative_to(SOURCE)))
    assert not wrong


def calls_on_import(node: ast.AST) -> Iterator[ast.Call]:
    """The calls that importing a file executes: not those in function bodies, nor under `__main__` guards."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            for evaluated in [*child.decorator_list, *child.args.defaults, *child.args.kw_defaults]:
                if evaluated is not None:
                    yield from calls_on_import(ast.Expr(evaluated))
            continue
        if isinstance(child, ast.Lambda) or (
            isinstance(child, ast.If) and "__name__" in ast.unparse(child.test)
        ):
            continue
        if isinstance(child, ast.Call):
            yield child
        yield from calls_on_import(child)
