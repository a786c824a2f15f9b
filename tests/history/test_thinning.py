"""What the thinning rule promises: pure, nested, bounded, and kind to what matters."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.history import thinning
from gradwatch.history.thinning import is_kept


def all_kept(newest, length, **protected):
    steps_T = np.arange(newest + 1)
    return steps_T[is_kept(steps_T, newest=newest, length=length, **protected)]


def stride(age):
    """The stride of a segment; the newest segment has age 0."""
    return 1 << (max(age - 1, 0) // thinning.FULL_SEGMENTS).bit_length()


def slowly_kept(step, *, newest, length, findings, validations):
    """The rule as the module's docstring says it, for one step."""
    own_stride = stride(newest // length - step // length)
    first_findings = list(dict.fromkeys(findings))[: thinning.MAX_FINDINGS]
    later_validations = [m for m in validations if m > step and m // own_stride == step // own_stride]
    return (
        step % own_stride == 0
        or step < thinning.FIRST_STEPS
        or any(abs(step - f) <= thinning.MARGIN_STEPS for f in first_findings)
        or (step in validations and not later_validations)
    )


@given(steps=st.sets(st.integers(0, 60)), others=st.sets(st.integers(0, 60)))
def test_steps_among_others_are_those_that_both_have(steps, others):
    steps_T, others_K = (np.array(sorted(some), np.int64) for some in (steps, others))

    assert steps_T[thinning.is_among(steps_T, others_K)].tolist() == sorted(steps & others)


@pytest.mark.parametrize("length", [64, 256, 1024])
def test_the_newest_segments_keep_every_step(length):
    newest = 100_000
    kept_T = all_kept(newest, length)
    first_full = (newest // length - thinning.FULL_SEGMENTS) * length

    assert np.array_equal(kept_T[kept_T >= first_full], np.arange(first_full, newest + 1)), "a gap in the full segments"


def test_the_longest_window_of_a_detector_is_kept_whole_at_any_time():
    for newest in range(3000, 3200):
        kept_T = all_kept(newest, thinning.MIN_SEGMENT_STEPS)
        assert np.array_equal(kept_T[-256:], np.arange(newest - 255, newest + 1)), f"a gap in the window at {newest}"


def test_stride_doubles_each_time_the_age_doubles():
    kept_T = all_kept(41 * 64 - 1, 64)

    strides = [64 // np.count_nonzero(kept_T // 64 == 40 - age) for age in (0, 4, 5, 8, 9, 16, 17, 32, 33)]

    assert strides == [1, 1, 2, 2, 4, 4, 8, 8, 16]


@settings(max_examples=60)
@given(
    newest=st.integers(0, 3000),
    length=st.sampled_from([16, 64]),
    findings=st.lists(st.integers(0, 3000), max_size=80),
    validations=st.lists(st.integers(0, 3000), max_size=40, unique=True).map(sorted),
)
def test_the_fast_rule_is_the_documented_rule(newest, length, findings, validations):
    steps_T = np.unique(np.linspace(0, newest, 97).astype(np.int64))
    fast_T = is_kept(steps_T, newest=newest, length=length, findings=findings, validations=validations)
    slow_T = [
        slowly_kept(s, newest=newest, length=length, findings=findings, validations=validations)
        for s in steps_T.tolist()
    ]
    assert fast_T.tolist() == slow_T


@settings(max_examples=40)
@given(
    moments=st.lists(st.integers(1, 4000), min_size=1, max_size=8, unique=True).map(sorted),
    findings=st.lists(st.integers(0, 4000), max_size=5),
    validations=st.lists(st.integers(0, 4000), max_size=60, unique=True).map(sorted),
)
def test_thinning_often_or_seldom_ends_in_the_same_rows(moments, findings, validations):
    steps_T = np.arange(moments[-1] + 1)
    often_T, kept_validations = steps_T[:0], validations
    begin = 0
    for newest in moments:
        often_T = np.concatenate([often_T, steps_T[begin : newest + 1]])
        begin = newest + 1
        often_T = often_T[is_kept(often_T, newest=newest, length=16, findings=findings, validations=kept_validations)]
        # a run that is read from disk knows only the kept_validations that are still there
        kept_validations = [m for m in validations if m in often_T or m > newest]
    seldom_T = steps_T[is_kept(steps_T, newest=moments[-1], length=16, findings=findings, validations=validations)]

    assert np.array_equal(often_T, seldom_T)


def test_rows_grow_with_the_logarithm_of_the_run():
    length = 64
    runs = [(thinning.FULL_SEGMENTS << doublings) * length for doublings in range(3, 10)]
    rows = [len(all_kept(newest, length)) for newest in runs]
    added = np.diff(rows)
    # FULL_SEGMENTS * 2^k segments of age up to twice that, each with a row in 2^(k+1) steps
    expected = thinning.FULL_SEGMENTS * length // 2
    assert np.abs(added - expected).max() <= 2, f"each doubling of the run adds {expected} rows: {rows}"


def test_findings_protect_their_surroundings_but_only_so_many():
    findings = [10_000 * i for i in range(1, 2 * thinning.MAX_FINDINGS)]
    bare, protected = all_kept(2_000_000, 64), all_kept(2_000_000, 64, findings=findings)
    around = np.arange(10_000 - thinning.MARGIN_STEPS, 10_000 + thinning.MARGIN_STEPS + 1)

    assert np.isin(around, protected).all(), "steps around a finding are missing"
    assert len(protected) - len(bare) <= thinning.MAX_FINDINGS * (2 * thinning.MARGIN_STEPS + 1), (
        "findings break the bound"
    )


def test_validation_steps_outlive_their_neighbours():
    validations = list(range(936, 60_000, 937))
    assert np.isin(validations, all_kept(60_000, 64, validations=validations)).all(), "a validation was thinned away"


def test_validation_at_every_step_at_most_doubles_the_rows():
    validations = range(20_001)
    assert len(all_kept(20_000, 64, validations=validations)) <= 2 * len(all_kept(20_000, 64))


def test_segments_fill_at_most_four_mebibytes_within_their_limits():
    assert thinning.choose_segment_length(128) == thinning.MAX_SEGMENT_STEPS
    assert thinning.choose_segment_length(6_400) == 512
    assert thinning.choose_segment_length(10_000_000) == thinning.MIN_SEGMENT_STEPS
