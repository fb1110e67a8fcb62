"""The help of ``paceline launch``, and of ``paceline test``, which takes the same options.

``--help`` explains the ten options that people use first and names the others; ``--help_all`` explains all.
Both are made from the table in ``options.py``.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.launch.options import FIRST, Option, options

_WIDTH, _MARGIN = 100, 43  # columns, and where the options' texts begin


@dataclass(frozen=True)
class HelpPages:
    """The help of one command.

    Attributes:
        usage: its form, in a line.
        description: what it does.
        examples: command lines.
    """

    usage: str
    description: str
    examples: tuple[str, ...]

    def short(self) -> str:
        """The ten options that are used first in full, the others by name."""
        groups = [f"{FIRST}:\n" + _explained(options(), FIRST)]
        for title in dict.fromkeys(option.group for option in options()):
            if title != FIRST:
                names = " ".join(o.spellings()[0] for o in options() if o.group == title)
                indented = textwrap.indent(textwrap.fill(names, _WIDTH - 2, break_on_hyphens=False), "  ")
                groups.append(f"{title}:\n{indented}\n")
        groups.append(f"`{' '.join(self.usage.split()[:2])} --help_all` explains them all.\n")
        return self._page(groups)

    def long(self) -> str:
        """All options in full."""
        titles = dict.fromkeys(option.group for option in options())
        return self._page([f"{title}:\n" + _explained(options(), title) for title in titles])

    def _page(self, groups: Sequence[str]) -> str:
        examples = "".join(f"  {example}\n" for example in self.examples)
        return "\n".join(
            [f"usage: {self.usage}\n", f"{self.description}\n", *groups, f"examples:\n{examples}"]
        )


def of_launch() -> HelpPages:
    """The help of ``paceline launch``."""
    return HelpPages(
        "paceline launch [options] script [script arguments]",
        "Starts a training script once for every rank. Options stand before the script, with _ or - between\n"
        "words; what follows the script is handed to it untouched.",
        (
            "paceline launch --num_processes 4 train.py --epochs 3",
            "paceline launch --cpu --num_processes 2 -m my_package.train",
            "paceline launch --num_processes 16 --num_machines 2 --machine_rank 0 --main_process_ip host0 "
            "train.py",
        ),
    )


def of_test() -> HelpPages:
    """The help of ``paceline test``."""
    return HelpPages(
        "paceline test [options of paceline launch]",
        "Trains a tiny model on the ranks that `paceline launch` with the same options would start, and\n"
        "checks that the replicas are bit-identical and equal one process on the joined batches.",
        ("paceline test", "paceline test --cpu --num_processes 2"),
    )


class ShowHelp(argparse.Action):
    """Prints a page of help and ends."""

    def __init__(self, *, text: Callable[[], str], **settings: Any) -> None:
        super().__init__(**settings)
        self._text = text

    def __call__(self, *_: Any) -> None:
        sys.stdout.write(self._text())
        sys.exit(0)


def _explained(table: Sequence[Option], group: str) -> str:
    lines = []
    for option in table:
        if option.group != group:
            continue
        names = [f"--{name}" if not name.startswith("-") else name for name in option.names]
        head = f"  {', '.join(names)} {option.metavar}".rstrip()
        margin = " " * _MARGIN
        text = textwrap.fill(option.help, _WIDTH, initial_indent=margin, subsequent_indent=margin)
        lines.append(f"{head:<{_MARGIN}}{text.lstrip()}" if len(head) < _MARGIN else f"{head}\n{text}")
    return "\n".join(lines) + "\n"
