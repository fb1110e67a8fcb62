"""The table of fields in docs/trainer.md is what the dataclass says.

`python -m tests.train.test_docs` writes it anew.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path

from paceline.train.arguments import TrainingArguments
from paceline.train.rules import NOT_SERVED

PAGE = Path(__file__).parents[2] / "docs" / "trainer.md"
START, END = "<!-- fields -->\n", "<!-- end of fields -->\n"


def tables() -> str:
    """Two tables: the fields that work, and those that raise when they are set."""
    served = ["| field | default | meaning |", "|---|---|---|"]
    missing = ["| field | instead |", "|---|---|"]
    for each in fields(TrainingArguments):
        default = each.default if each.default is not MISSING else []
        if each.name in NOT_SERVED:
            missing.append(f"| `{each.name}` | {NOT_SERVED[each.name]} |")
        else:
            served.append(f"| `{each.name}` | `{default!r}` | {each.metadata['help']} |")
    heading = "\nThese raise an `ArgumentError` when they are set to anything but their default:\n"
    return "\n".join([*served, heading, *missing]) + "\n"


def test_the_page_lists_every_field_as_it_is() -> None:
    text = PAGE.read_text()
    assert text[text.index(START) + len(START) : text.index(END)] == tables()


if __name__ == "__main__":
    page = PAGE.read_text()
    head, tail = page[: page.index(START)], page[page.index(END) :]
    PAGE.write_text(head + START + tables() + tail)
