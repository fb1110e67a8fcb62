"""The bucket plan: a pure function, so checked on thousands of generated inputs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.plan import BucketCaps, ParameterSpec, plan_buckets, registration_order


def spec(numel: int, kind: str = "f", sparse: bool = False) -> ParameterSpec:
    return ParameterSpec(name="p", shape=(numel,), element_size=4, kind=kind, sparse=sparse)


specs_strategy = st.lists(
    st.builds(
        spec,
        numel=st.integers(0, 50),
        kind=st.sampled_from("fdh"),
        sparse=st.sampled_from([False] * 9 + [True]),
    ),
    min_size=1,
    max_size=40,
)
caps_strategy = st.builds(
    BucketCaps,
    limits=st.lists(st.integers(1, 400), min_size=1, max_size=3).map(tuple),
    last=st.one_of(st.none(), st.integers(1, 200)),
)


@st.composite
def planning(draw):
    specs = draw(specs_strategy)
    order = draw(st.permutations(range(len(specs))))
    trailing = draw(st.sets(st.sampled_from(range(len(specs)))))
    return specs, order, draw(caps_strategy), frozenset(trailing)


@given(planning())
def test_every_parameter_lies_in_exactly_one_bucket(case):
    specs, order, caps, trailing = case
    plan = plan_buckets(specs, order, caps, trailing)
    assert sorted(index for bucket in plan.buckets for index in bucket) == list(range(len(specs)))
    assert all(plan.buckets)


@given(planning())
def test_a_bucket_holds_one_kind_and_sparse_ones_travel_alone(case):
    specs, order, caps, trailing = case
    for bucket in plan_buckets(specs, order, caps, trailing).buckets:
        assert len({specs[index].kind for index in bucket}) == 1
        assert len(bucket) == 1 or not any(specs[index].sparse for index in bucket)


@given(planning())
def test_a_bucket_is_closed_as_soon_as_it_reaches_its_cap(case):
    specs, order, caps, trailing = case
    largest = max(caps.limits)
    for bucket in plan_buckets(specs, order, caps, trailing).buckets:
        assert sum(specs[index].nbytes for index in bucket[:-1]) < largest


@given(planning())
def test_buckets_are_ordered_by_when_they_can_be_launched(case):
    specs, order, caps, trailing = case
    place = {index: position for position, index in enumerate(order)}
    regular = [b for b in plan_buckets(specs, order, caps, trailing).buckets if b[0] not in trailing]
    ends = [place[bucket[-1]] for bucket in regular]
    assert ends == sorted(ends)
    for bucket in regular:
        assert [place[index] for index in bucket] == sorted(place[index] for index in bucket)


@given(planning())
def test_trailing_parameters_hold_up_no_others(case):
    specs, order, caps, trailing = case
    buckets = plan_buckets(specs, order, caps, trailing).buckets
    late = [any(index in trailing for index in bucket) for bucket in buckets]
    assert late == sorted(late)
    assert all(len({index in trailing for index in bucket}) == 1 for bucket in buckets)


@given(planning())
def test_the_last_bucket_is_small_or_a_single_parameter(case):
    specs, order, caps, trailing = case
    last = plan_buckets(specs, order, caps, trailing).buckets[-1]
    if caps.last is not None and len([i for i in last if specs[i].nbytes]) > 1:
        assert sum(specs[index].nbytes for index in last) <= caps.last


def test_default_caps_start_and_end_small():
    specs = [spec(1024 * 256) for _ in range(60)]  # 60 parameters of 1 MiB
    sizes = [len(bucket) for bucket in plan_buckets(specs, registration_order(60), BucketCaps()).buckets]
    assert sizes == [1, 25, 25, 8, 1]


def test_the_users_cap_is_kept():
    specs = [spec(1024 * 256) for _ in range(10)]
    sizes = [
        len(bucket)
        for bucket in plan_buckets(specs, registration_order(10), BucketCaps.from_megabytes(4)).buckets
    ]
    assert sizes == [4, 4, 2]


def test_different_plans_have_different_fingerprints():
    specs = [spec(10), spec(20)]
    straight = plan_buckets(specs, [0, 1], BucketCaps((8,), None))
    swapped = plan_buckets(specs, [1, 0], BucketCaps((8,), None))
    assert straight.fingerprint != swapped.fingerprint
    assert straight.fingerprint == plan_buckets(specs, [0, 1], BucketCaps((8,), None)).fingerprint
