"""Command lines for dataclasses, as ``transformers.HfArgumentParser`` reads them, without transformers.

    parser = ArgumentParser((ModelArguments, TrainingArguments))
    model_args, args = parser.parse_args_into_dataclasses()

A field becomes ``--its_name`` and ``--its-name``, with its metadata (help, choices, aliases) as settings:

    int, float, str          --seed 7
    bool                     --bf16, --bf16 true; with default True also --no_bf16
    list of these            --label_names a b
    an enum, or Literal      one of its values
    a dict                   JSON: --optim_args '{"momentum": 0.9}'
    one of these or None     the same
    str or something else    str where None is allowed as well; else the something else
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from paceline.errors import ArgumentError

_TRUE, _FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")


class ArgumentParser(argparse.ArgumentParser):
    """Fills dataclasses from a command line, a dict, or a JSON or YAML file.

    Args:
        dataclass_types: one dataclass, or several whose fields have different names.
        settings: for argparse.ArgumentParser. Arguments may be added to the parser as to any other.

    Raises:
        ArgumentError: a field's type cannot be read from a command line.
    """

    def __init__(self, dataclass_types: type | Iterable[type] = (), **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(**settings)
        given: Any = dataclass_types
        self.dataclass_types: list[Any] = [given] if is_dataclass(given) else list(given)
        for each in self.dataclass_types:
            self._add_fields(each)

    def parse_args_into_dataclasses(
        self,
        args: list[str] | None = None,
        return_remaining_strings: bool = False,
        look_for_args_file: bool = True,
        args_filename: str | None = None,
        args_file_flag: str | None = None,
    ) -> tuple[Any, ...]:
        """Read a command line; of an option that comes twice, the last one counts.

        Args:
            args: the words; default: those the script was called with.
            return_remaining_strings: give unknown words back, as the last entry, instead of raising.
            look_for_args_file: if there is a file ``<script>.args``, its words come before `args`.
            args_filename: the file to read such words from instead.
            args_file_flag: an option that names more such files, such as "--args_file".

        Returns:
            an instance of each dataclass, then a namespace of arguments that were added by hand, if any.

        Raises:
            ArgumentError: words that no option takes.
        """
        words = sys.argv[1:] if args is None else list(args)
        files = [Path(args_filename)] if args_filename else []
        if not files and look_for_args_file and sys.argv:
            files = [Path(sys.argv[0]).with_suffix(".args")]
        if args_file_flag:
            named, words = _take_files(args_file_flag, words)
            files += named
        before = [word for file in files if file.exists() for word in file.read_text().split()]
        namespace, unknown = self.parse_known_args(before + words)
        if unknown and not return_remaining_strings:
            raise ArgumentError(f"unknown arguments: {' '.join(unknown)}; see --help")
        found = vars(namespace)
        made = [
            kind(**{each.name: found.pop(each.name) for each in _init_fields(kind)})
            for kind in self.dataclass_types
        ]
        rest = [argparse.Namespace(**found)] if found else []
        return (*made, *rest, unknown) if return_remaining_strings else (*made, *rest)

    def parse_dict(self, args: Mapping[str, Any], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """An instance of each dataclass, from values by name.

        Raises:
            ArgumentError: a name that no dataclass has, unless these are allowed.
        """
        of_each = [
            {each.name for each in _init_fields(kind)}.intersection(args) for kind in self.dataclass_types
        ]
        unknown = sorted(set(args).difference(*of_each))
        if unknown and not allow_extra_keys:
            raise ArgumentError(f"unknown entries: {', '.join(unknown)}")
        return tuple(
            kind(**{name: args[name] for name in names})
            for kind, names in zip(self.dataclass_types, of_each, strict=True)
        )

    def parse_json_file(self, json_file: str | Path, allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """The same from a JSON file."""
        return self.parse_dict(json.loads(Path(json_file).read_text(encoding="utf-8")), allow_extra_keys)

    def parse_yaml_file(self, yaml_file: str | Path, allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """The same from a YAML file."""
        return self.parse_dict(yaml.safe_load(Path(yaml_file).read_text(encoding="utf-8")), allow_extra_keys)

    def _add_fields(self, kind: Any) -> None:
        title = getattr(kind, "_argument_group_name", None)
        group = self.add_argument_group(title) if title else self
        hints = get_type_hints(kind)
        for each in _init_fields(kind):
            _add_option(group, each, hints[each.name])


def _init_fields(kind: Any) -> list[Field[Any]]:
    return [each for each in fields(kind) if each.init]


def _take_files(flag: str, words: list[str]) -> tuple[list[Path], list[str]]:
    """The files that an option names, and the words without it."""
    reader = argparse.ArgumentParser(add_help=False)
    reader.add_argument(flag, dest="files", action="append", type=Path, default=[])
    found, rest = reader.parse_known_args(words)
    return found.files, rest


def _add_option(group: Any, each: Field[Any], hint: Any) -> None:
    """The option of one field, and its --no_ twin where it is on by default."""
    more = dict(each.metadata)
    aliases = more.pop("aliases", [])
    names = [f"--{each.name}", *([aliases] if isinstance(aliases, str) else aliases)]
    kind = _kind_of(each.name, hint)
    settings = {**more, **_default_of(each, kind), **_reading(each, kind, hint)}
    group.add_argument(*_both_spellings(names), **settings)
    if kind is bool and each.default is True:
        twin = _both_spellings([f"--no_{each.name}"])
        group.add_argument(*twin, action="store_false", dest=each.name, default=False, help=more.get("help"))


def _both_spellings(names: list[str]) -> list[str]:
    """Options with underscores, and the first with hyphens as well."""
    hyphens = "--" + names[0].removeprefix("--").replace("_", "-")
    return [names[0], *([hyphens] if hyphens != names[0] else []), *names[1:]]


def _kind_of(name: str, hint: Any) -> Any:
    """The one type that the words of an option are read as; None and choices between types are left out.

    Raises:
        ArgumentError: there are several.
    """
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    kinds = [each for each in get_args(hint) if each is not type(None)]
    optional = len(kinds) < len(get_args(hint))
    if len(kinds) > 1 and str in kinds:
        kinds = [str] if optional else [each for each in kinds if each is not str]
    if len(kinds) != 1:
        raise ArgumentError(
            f"the field {name} may be any of {', '.join(map(str, kinds))}, but a command line needs "
            f"one type; annotate it as one of them, or None, or str"
        )
    return kinds[0]


def _default_of(each: Field[Any], kind: Any) -> dict[str, Any]:
    if each.default is not MISSING:
        return {"default": each.default}
    if each.default_factory is not MISSING:
        return {"default": each.default_factory()}
    return {"default": False} if kind is bool else {"required": True}


def _reading(each: Field[Any], kind: Any, hint: Any) -> dict[str, Any]:
    """How the words become a value, in argparse's settings."""
    if kind is bool:
        alone = hint is bool or each.default not in (None, MISSING)
        return {"type": _truth, **({"nargs": "?", "const": True} if alone else {})}
    if get_origin(kind) is Literal:
        return _one_of(get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _one_of([member.value for member in kind])
    origin = get_origin(kind) or kind
    if origin is list:
        inner = get_args(kind)
        return {"type": inner[0] if inner else str, "nargs": "+"}
    return {"type": _json_object if origin is dict else kind}


def _one_of(choices: Iterable[Any]) -> dict[str, Any]:
    by_text = {str(choice): choice for choice in choices}
    read: Callable[[str], Any] = lambda text: by_text.get(text, text)  # noqa: E731  (argparse names it in errors)
    return {"choices": list(by_text.values()), "type": read}


def _truth(text: str) -> bool:
    if text.lower() in (*_TRUE, *_FALSE):
        return text.lower() in _TRUE
    raise argparse.ArgumentTypeError(f"{text!r} is neither of {', '.join((*_TRUE, *_FALSE))}")


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return found
