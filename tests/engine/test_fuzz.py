"""Random programs: every rank holds what plain PyTorch gives on average, bit for bit alike.

The long run is ``python -m tests.engine.fuzz``.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from tests.engine.programs import draw_program
from tests.engine.rank_pool import InvalidProgramError, RankPools

PROGRAMS = 200


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    with RankPools() as started:
        yield started


@pytest.mark.timeout(300)
@settings(
    max_examples=PROGRAMS,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # a program is made smaller by what it says, below
    suppress_health_check=list(HealthCheck),
)
@given(random=st.randoms(use_true_random=False))
def test_random_programs(pools, random):
    program = draw_program(random)
    try:
        verdict = pools.verdict(program)
    except InvalidProgramError:
        assume(False)
    if verdict is not None:
        program, verdict = pools.shrink(program, verdict)
        pytest.fail(f"{program}\n{verdict}", pytrace=False)


def first_to_go_wrong(defect: str, most: int) -> int | None:
    """Number of the first random program of two ranks that goes wrong with a defect in the engine."""
    with RankPools(defect) as pools:
        for number in range(most):
            program = draw_program(Random(number))
            try:
                if program.world == 2 and pools.verdict(program) is not None:
                    return number
            except InvalidProgramError:
                pass
    return None


QUICKLY_NOTICED = ("sums_instead_of_averages", "late_gradients_are_lost", "a_changed_module_is_not_noticed")
ALSO_NOTICED = (
    "unused_parameters_get_zeros",
    "averages_over_the_ranks_that_used_it",
    "kept_gradients_are_overwritten",
    "no_sync_counts_in_forward",
    "construction_broadcasts_nothing",
    "unused_parameters_are_not_an_error",
    "a_peers_failure_is_not_noticed",
)


@pytest.mark.parametrize(
    "defect", [*QUICKLY_NOTICED, *(pytest.param(name, marks=pytest.mark.slow) for name in ALSO_NOTICED)]
)
def test_random_programs_notice_a_planted_defect(defect):
    assert first_to_go_wrong(defect, 300) is not None
