"""Which rank held up the others, told from states alone."""

from __future__ import annotations

from typing import Any

from paceline.diagnose.comparison import compare, context, skipped_backward
from paceline.recorder.reading import RankState
from paceline.recorder.words import ranks, seconds

NOW = 1000.0
BUCKET = "backward pass 118, all-reduce of bucket 3 of 4 (layer4.weight, layer4.bias)"


def state(rank: int, **more: Any) -> RankState:
    return RankState(rank, **{"seen": NOW - 0.2, "passes": 117, **more})


def waiting(rank: int, words: str = BUCKET, since: float = 30.0, **more: Any) -> RankState:
    return state(rank, waits_for=words, waits_since=NOW - since, passes=118, **more)


def asleep(rank: int, **more: Any) -> RankState:
    where = {
        "line": "train.py:41 in load",
        "line_since": NOW - 41,
        "doing": "data loading",
        "asleep": True,
        "stands": True,
    }
    return state(rank, phase="between backward pass 117 and the next forward", **{**where, **more})


def test_a_rank_that_sleeps_in_its_data_loading_is_found() -> None:
    found = compare([waiting(0), waiting(1), asleep(2), waiting(3)], NOW)
    assert found is not None and found.culprits == (2,)
    assert found.text.startswith(
        "rank 2 held up the others: it was asleep in data loading for 41 s at train.py:41 in load, between "
        f"backward pass 117 and the next forward. Ranks 0, 1 and 3 had waited 30 s for {BUCKET}. "
    )
    assert "num_workers" in found.text


def test_a_rank_that_computes_for_ever_is_found() -> None:
    where = {"line": "train.py:7 in solve", "line_since": NOW - 25, "stands": True}
    stuck = state(1, phase="forward before backward pass 118", **where)
    found = compare([waiting(0), stuck], NOW)
    assert found is not None
    assert "busy for 25 s at train.py:7 in solve, in forward before backward pass 118" in found.text
    assert "Look at that line" in found.text


def test_several_absent_ranks_are_all_named() -> None:
    found = compare([asleep(0), waiting(1), asleep(2)], NOW)
    assert found is not None and found.culprits == (0, 2)
    assert "ranks 0 and 2 held up the others. Rank 0 was asleep" in found.text


def test_ranks_in_different_collectives_are_told_apart() -> None:
    found = compare([waiting(0), waiting(1, "collective 6 (barrier in process group 0, 0 bytes)")], NOW)
    assert found is not None and found.culprits == ()
    assert "different things" in found.text
    assert f"Rank 0 had waited 30 s for {BUCKET}. Rank 1 had waited 30 s for collective 6" in found.text


def test_a_rank_that_has_left_the_loop_is_out_of_step() -> None:
    left = state(1, waits_for="averaging the metrics", waits_since=NOW - 30)
    found = compare([waiting(0), left], NOW)
    assert found is not None
    assert "rank 0 has begun 118 backward passes; rank 1 has begun 117 backward passes." in found.text


def test_the_few_that_wait_for_something_else_are_named() -> None:
    other = waiting(2, "collective 6 (barrier in process group 0, 0 bytes)")
    found = compare([waiting(0), waiting(1), other], NOW)
    assert found is not None and found.culprits == (2,)
    assert found.text.startswith(
        "rank 2 waits for something else than the rest, so nobody gets on. Ranks 0 and"
    )


def test_one_call_with_different_arguments_is_no_riddle() -> None:
    words = "a collective (broadcast) at train.py:9 in step"
    found = compare([waiting(0, words, since=6.2), waiting(1, words, since=6.0)], NOW)
    assert found is not None and (found.kind, found.culprits) == ("alike", ())
    assert f"Ranks 0 and 1 had waited 6.2 s for {words}." in found.text
    assert "src, dst, group, shapes" in found.text


def test_ranks_that_do_not_find_each_other_are_told_where_to_meet() -> None:
    words = "a collective (init_process_group) at train.py:9"
    found = compare([waiting(0, words), waiting(1, words)], NOW)
    assert found is not None and "leave out init_method" in found.text
    assert "shapes" not in found.text


def test_of_waits_whose_arguments_are_recorded_nothing_is_guessed() -> None:
    assert compare([waiting(0), waiting(1)], NOW) is None


def test_an_end_of_the_script_is_no_place() -> None:
    left = state(1, line="train.py:99", stands=True, over=NOW - 4)
    assert context(left, [waiting(0)], NOW) == f"Rank 0 had waited 30 s for {BUCKET}."
    found = compare([waiting(0), left], NOW)
    assert found is not None and "rank 1 held up the others: it was past the end of its script for 4.0 s" in (
        found.text
    )


def test_waits_that_have_just_begun_are_not_compared_by_their_words() -> None:
    assert compare([waiting(0), waiting(1, "a collective", since=0.1)], NOW) is None


def test_a_rank_that_came_when_the_others_had_given_up_is_found() -> None:
    gave_up = {"wait_failed": True, "waits_until": NOW - 1}
    found = compare([waiting(0, since=31, **gave_up), waiting(1, since=1.1, **gave_up)], NOW)
    assert found is not None and found.culprits == (1,)
    assert f"it came to {BUCKET} 30 s after the first" in found.text


def test_nothing_is_made_up() -> None:
    assert compare([], NOW) is None
    assert compare([state(0), state(1)], NOW) is None
    assert compare([waiting(0), waiting(1)], NOW) is None
    assert skipped_backward([state(0), state(1)]) is None
    assert context(None, [], NOW) == ""


def test_where_a_known_cause_was_and_who_waited() -> None:
    where = {"line": "train.py:9", "line_since": NOW - 0.1, "stands": True}
    killed = state(1, phase="backward pass 118, bucket 1 of 4 (head.weight) launched", **where)
    text = context(killed, [waiting(0, since=0.4)], NOW)
    assert text == (
        "Rank 1 was at train.py:9, in backward pass 118, bucket 1 of 4 (head.weight) launched. "
        f"Rank 0 had waited 0.4 s for {BUCKET}."
    )
    assert "train.py" not in context(killed, [], NOW, with_line=False)


def test_a_rank_that_fell_silent_is_not_said_to_stand_anywhere_since() -> None:
    text = context(asleep(1, seen=NOW - 20), [], NOW)
    assert "for 21 s at train.py:41" in text and "last heard of 20 s before" in text


def test_the_rank_that_skipped_a_backward_is_named() -> None:
    states = [state(rank, passes=5, forwards={4: 1, 5: 1 + (rank == 2)}) for rank in range(3)]
    found = skipped_backward(states)
    assert found is not None and found.culprits == (2,)
    assert (
        "before backward pass 5 ranks 0 and 1 ran 1 forward, but rank 2 ran 2: rank 2 skipped" in found.text
    )


def test_of_two_ranks_the_one_with_more_forwards_skipped() -> None:
    found = skipped_backward([state(0, passes=5, forwards={5: 2}), state(1, passes=5, forwards={5: 1})])
    assert found is not None and found.culprits == (0,)


def test_a_rank_with_a_backward_too_many_is_named() -> None:
    found = skipped_backward([state(0, passes=5, forwards={5: 1}), state(1, passes=5, forwards={4: 1})])
    assert found is not None and found.culprits == (1,)
    assert "rank 1 ran none" in found.text and "a backward more" in found.text


def test_words() -> None:
    assert ranks([3]) == "rank 3"
    assert ranks([2, 0]) == "ranks 0 and 2"
    assert ranks([0, 1]) == "ranks 0 and 1"
    assert ranks([*range(8), 11, 12]) == "ranks 0-7, 11 and 12"
    assert [seconds(s) for s in (-1, 0.44, 41.2, 700)] == ["0.0 s", "0.4 s", "41 s", "12 min"]
