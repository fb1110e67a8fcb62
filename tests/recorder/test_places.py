"""Of all lines on a stack, the user's is named, and what goes on below it."""

from __future__ import annotations

import os
import sysconfig

import pytest

from paceline.comm import waiting
from paceline.recorder.places import Place, doing, of_traceback, of_written_stack, users

TORCH = f"{sysconfig.get_path('purelib')}/torch"
MINE = Place("/home/me/train.py", 41, "load")
C10D, WRAPPER = f"{TORCH}/distributed/distributed_c10d.py", f"{TORCH}/distributed/c10d_logger.py"


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        ([], ""),
        ([Place(f"{TORCH}/utils/data/dataloader.py", 9, "_try_get_data")], "data loading"),
        ([Place(C10D, 9, "all_reduce"), Place(WRAPPER, 8, "wrapper")], "a collective (all_reduce)"),
        ([Place(C10D, 9, "all_gather"), Place(C10D, 7, "all_gather_object")],
         "a collective (all_gather_object)"),
        ([Place(C10D, 9, "_new_process_group_helper"), Place(C10D, 1, "init_process_group")],
         "a collective (init_process_group)"),
        ([Place(waiting.__file__, 9, "wait")], "a collective"),
    ],
)  # fmt: skip
def test_what_goes_on_is_told_from_the_files_below_the_users(inner: list[Place], words: str) -> None:
    stack = [*inner, MINE, Place("/home/me/train.py", 60, "<module>")]
    assert (users(stack), doing(stack)) == (MINE, words)


def test_where_no_line_is_the_users_the_innermost_is_named() -> None:
    library = Place(os.__file__, 3, "walk")
    assert users([library]) == library


def test_a_traceback_is_read_from_the_line_that_raised() -> None:
    def raising() -> None:
        raise ValueError

    with pytest.raises(ValueError) as caught:
        raising()
    places = of_traceback(caught.value.__traceback__)
    assert places[0].name == "raising"
    assert places[-1].name == "test_a_traceback_is_read_from_the_line_that_raised"
    assert of_traceback(None) == []


def test_a_written_stack_is_read() -> None:
    written = [
        "Thread 0x00007f (most recent call first):",
        '  File "/a b/train.py", line 41 in load',
        "",
        "x",
    ]
    assert of_written_stack(written) == [Place("/a b/train.py", 41, "load")]
