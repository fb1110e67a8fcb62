"""Our own tests must notice: the engine is broken on purpose, one defect at a time, under a real test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests import ranks
from tests.engine import (
    test_buffers,
    test_faults,
    test_gradients,
    test_more,
    test_pass,
    test_wrapper,
)
from tests.engine.defects import CANNOT_PLANT, DEFECTS, Planted

# defect -> the test that notices it, and its arguments
NOTICED_BY: dict[str, tuple[Any, ...]] = {
    "never_reduces": (test_gradients.test_forward_bypassed,),
    "sums_instead_of_averages": (test_gradients.test_several_forwards_before_several_backwards,),
    "averages_over_the_ranks_that_used_it": (
        test_gradients.test_unused_parameters_get_the_mean_with_zeros_or_stay_none,
        2,
    ),
    "ranks_differ_in_the_last_bits": (
        test_gradients.test_any_number_of_ranks_holds_bit_identical_averages,
        3,
    ),
    "half_precision_is_summed_before_the_division": (
        test_more.test_float16_gradients_whose_sum_overflows_have_an_average,
    ),
    "moved_gradients_stay_where_they_are": (
        test_gradients.test_gradients_that_were_moved_to_other_memory_are_averaged_all_the_same,
    ),
    "unused_parameters_get_zeros": (
        test_gradients.test_unused_parameters_get_the_mean_with_zeros_or_stay_none,
        2,
    ),
    "late_gradients_are_lost": (
        test_gradients.test_gradient_that_comes_after_its_bucket_was_launched_is_not_lost,
        True,
        {},
    ),
    "ranks_without_data_always_count": (
        test_wrapper.test_join_counts_ranks_without_data_as_zero_or_not_at_all,
        False,
    ),
    "sparse_gradients_become_dense": (test_gradients.test_sparse_gradients_on_all_ranks_some_ranks_and_none,),
    "a_second_copy_of_the_gradients": (
        test_gradients.test_gradients_share_one_storage_and_kept_ones_stay_as_they_are,
    ),
    "bucket_views_are_ignored": (test_gradients.test_with_bucket_views_the_memory_is_used_again,),
    "kept_gradients_are_overwritten": (
        test_gradients.test_gradients_share_one_storage_and_kept_ones_stay_as_they_are,
    ),
    "the_bucket_cap_is_ignored": (test_pass.test_the_bucket_cap_decides_how_much_travels_at_once,),
    "everything_is_launched_at_the_end": (test_pass.test_buckets_are_launched_while_backward_goes_on,),
    "a_full_bucket_waits_for_the_gradient_that_was_last_in_the_plan": (
        test_pass.test_a_bucket_is_launched_with_its_last_gradient_whichever_that_is,
    ),
    "a_pass_begins_at_the_forwards_outputs_alone": (
        test_pass.test_any_single_gradient_is_averaged_however_its_backward_began,
    ),
    "each_rank_follows_its_own_order": (test_pass.test_all_ranks_take_rank_0s_order,),
    "the_order_of_arrival_is_never_used": (
        test_pass.test_buckets_follow_the_order_of_arrival_after_the_first_pass,
    ),
    "unused_parameters_hold_up_others": (
        test_more.test_a_parameter_that_falls_out_of_use_moves_behind_all_others,
    ),
    "users_hooks_come_too_late": (test_pass.test_users_hooks_see_and_change_the_local_gradient,),
    "the_tail_costs_a_collective": (test_pass.test_a_step_costs_one_all_reduce_a_bucket_and_nothing_else,),
    "autograd_grad_communicates": (test_more.test_autograd_grad_sends_nothing,),
    "the_hook_is_skipped": (
        test_pass.test_a_communication_hook_gets_undivided_gradients_and_decides_the_result,
    ),
    "the_hooks_result_is_ignored": (
        test_pass.test_a_communication_hook_gets_undivided_gradients_and_decides_the_result,
    ),
    "no_sync_is_ignored": (test_gradients.test_no_sync_keeps_gradients_local_until_the_next_backward,),
    "no_sync_counts_in_forward": (test_gradients.test_no_sync_counts_when_backward_starts_not_in_forward,),
    "no_sync_stays_after_an_exception": (test_more.test_no_sync_ends_when_an_exception_leaves_it,),
    "construction_broadcasts_nothing": (
        test_more.test_construction_makes_parameters_and_buffers_those_of_rank_0,
    ),
    "construction_compares_nothing": (
        test_faults.test_different_models_raise_in_the_constructor_on_every_rank,
        "dtype",
        "1.weight",
    ),
    "buffers_are_never_broadcast": (
        test_wrapper.test_buffers_follow_rank_0_at_construction_and_in_training_forwards,
    ),
    "buffers_differ_until_the_next_forward": (
        test_buffers.test_all_ranks_evaluate_and_save_the_model_of_rank_0_after_a_step,
        False,
    ),
    "buffers_are_broadcast_in_every_forward": (
        test_pass.test_a_step_costs_one_all_reduce_a_bucket_and_nothing_else,
    ),
    "a_changed_module_is_not_noticed": (
        test_gradients.test_parameters_changed_after_wrapping_are_averaged_and_equal,
        test_gradients.unfreeze,
    ),
    "new_parameters_are_not_broadcast": (
        test_gradients.test_parameters_changed_after_wrapping_are_averaged_and_equal,
        test_gradients.replace_layer,
    ),
    "unused_parameters_are_not_an_error": (
        test_gradients.test_unused_parameters_without_permission_average_and_then_raise_on_every_rank,
    ),
    "static_graph_is_ignored": (
        test_pass.test_a_static_graph_that_changes_is_an_error_that_names_the_parameter,
    ),
    "ranks_out_of_step_are_not_noticed": (
        test_faults.test_a_skipped_backward_is_an_error_on_every_rank_and_not_a_wrong_average,
    ),
    "a_peers_failure_is_not_noticed": (
        test_faults.test_after_an_exception_in_backward_every_rank_knows_and_training_goes_on,
        (1,),
    ),
    "a_failed_backward_leaves_the_others_waiting": (
        test_faults.test_after_an_exception_in_backward_every_rank_knows_and_training_goes_on,
        (1,),
    ),
}


def plant(monkeypatch: pytest.MonkeyPatch, defect: str | None) -> None:
    """Have ranks started from now on run with the defect, and give up soon."""
    start = ranks._run

    def start_planted(function: Callable[..., Any], world_size: int, args: Any, *limits: Any, **rest: Any):
        timeout, backend, group_timeout, *others = limits
        limits = (min(timeout, 20.0), backend, min(group_timeout, 4.0), *others)
        return start(Planted(defect, function), world_size, args, *limits, **rest)

    monkeypatch.setattr(ranks, "_run", start_planted)


def test_every_defect_has_a_test_that_notices_it():
    assert NOTICED_BY.keys() == DEFECTS.keys()


QUICK = (
    "sums_instead_of_averages",
    "late_gradients_are_lost",
    "a_second_copy_of_the_gradients",
    "the_bucket_cap_is_ignored",
    "everything_is_launched_at_the_end",
    "no_sync_is_ignored",
    "static_graph_is_ignored",
    "ranks_out_of_step_are_not_noticed",
)


HARMLESS_ON = {"shm": ("half_precision_is_summed_before_the_division",)}  # which sums it in 32 bits


@pytest.mark.parametrize(
    "defect", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in NOTICED_BY]
)
def test_a_planted_defect_is_noticed(defect, monkeypatch):
    if defect in HARMLESS_ON.get(ranks.BACKEND, ()):
        pytest.skip(f"no defect on {ranks.BACKEND}")
    test, *arguments = NOTICED_BY[defect]
    plant(monkeypatch, defect)
    with pytest.raises(AssertionError) as noticed:
        test(*arguments)
    assert CANNOT_PLANT not in str(noticed.value)


@pytest.mark.slow
@pytest.mark.parametrize("noticing", {id(case[0]): case for case in NOTICED_BY.values()}.values())
def test_nothing_is_noticed_where_no_defect_is_planted(noticing, monkeypatch):
    test, *arguments = noticing
    plant(monkeypatch, None)
    test(*arguments)
