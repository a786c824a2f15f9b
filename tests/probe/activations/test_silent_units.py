"""What is remembered of silent units is true, takes bits, and survives a resume."""

import math

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.probe.activations.bitmask import num_bytes, packed
from gradwatch.probe.activations.silent_units import AGREEING_FRAC, SilentUnits

SILENT, SINCE, UNITS = range(3)
EVERY = 10


def dying(samples, units, *, seed):
    """Which units are dead at each sample: each fires at times, until it dies for good, or not at all."""
    rng = np.random.default_rng(seed)
    death_U = rng.integers(0, 2 * samples, units)
    selective_TU = rng.random((samples, units)) < 0.4
    return selective_TU | (np.arange(samples)[:, None] >= death_U)


@given(samples=st.integers(1, 200), sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_what_is_reported_is_true_of_the_past(samples, sizes, seed):
    silence = SilentUnits()
    modules = [dying(samples, size, seed=seed + i) for i, size in enumerate(sizes)]

    for t in range(samples):
        row_3A = silence.add(EVERY * t, [packed(dead_TU[t]) for dead_TU in modules])
        for a, dead_TU in enumerate(modules):
            silent, since, units = row_3A[:, a]
            now = reference.silent_since(dead_TU[: t + 1], max(t - 1, 0))
            if not sizes[a]:
                assert np.isnan(row_3A[:, a]).all(), "there is nothing to be silent"
                continue
            assert units == sizes[a]
            if not now:
                assert (silent, math.isnan(since)) == (0, True), "none is silent at two samples"
                continue
            assert silent == reference.silent_since(dead_TU[: t + 1], int(since) // EVERY)
            assert silent >= AGREEING_FRAC * now, "it speaks of most that are silent now"


def test_the_step_of_a_sudden_death_is_reported_within_a_quarter_of_its_age():
    silence = SilentUnits()
    for t in range(1000):
        dead_U = np.zeros(256, np.bool_)
        dead_U[:37] = t >= 400
        (silent, since, units) = silence.add(t, [packed(dead_U)])[:, 0]
        if t >= 402:
            assert (silent, units) == (37, 256)
            assert 400 <= since <= t - (t - 400) / 4


def test_units_that_never_fired_are_silent_since_the_first_sample():
    silence = SilentUnits()
    dead_U = np.arange(20) < 4

    for t in range(50):
        row_3A = silence.add(7 + t, [packed(dead_U)])

    assert row_3A[:, 0].tolist() == [4, 7, 20]


@pytest.mark.parametrize("samples", [10, 10_000])
def test_it_takes_a_byte_for_each_unit_however_long_the_run_is(samples):
    silence = SilentUnits()
    dead_U = np.arange(4095) < 40

    for t in range(samples):
        row_3A = silence.add(t, [packed(dead_U)])

    assert silence.state()["since"].nbytes == 4096
    assert row_3A[:, 0].tolist() == [40, 0, 4095]


def test_a_module_that_did_not_run_stays_as_silent_as_it_was():
    silence = SilentUnits()
    for t in range(4):
        silence.add(t, [packed(np.array([True, False])), packed(np.array([True, True, False]))])

    row_3A = silence.add(4, [packed(np.array([True, True])), None])

    assert row_3A[:, 1].tolist() == [2, 0, 3]


def test_other_units_than_before_begin_anew():
    silence = SilentUnits()
    silence.add(0, [packed(np.ones(8, np.bool_))])

    row_3A = silence.add(10, [packed(np.ones(9, np.bool_))])

    assert row_3A[:, 0].tolist() == [9, 10, 9]


@given(flags=st.lists(st.booleans(), max_size=40))
def test_packed_flags_are_the_flags(flags):
    units = packed(np.array(flags, np.bool_))

    assert units.flags().tolist() == flags
    assert len(units.bits) == num_bytes(len(flags))
    assert sum(int(byte).bit_count() for byte in units.bits) == sum(flags), "other bits are 0"


def test_it_goes_on_from_its_state_as_if_nothing_had_been():
    dead_TU = dying(90, 33, seed=1)
    whole, first, second = SilentUnits(), SilentUnits(), SilentUnits()
    for t in range(50):
        whole.add(t, [packed(dead_TU[t])])
        first.add(t, [packed(dead_TU[t])])
    state = first.state()
    first.add(50, [packed(~dead_TU[0])])
    second.restore(state)

    for t in range(50, 90):
        np.testing.assert_array_equal(second.add(t, [packed(dead_TU[t])]), whole.add(t, [packed(dead_TU[t])]))
