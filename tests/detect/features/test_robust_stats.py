"""Medians, lines and trends against their slow twins in NumPy."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.detect.features.robust_stats import block_medians, log10, median, monotone_rise, slope, trend


@given(st.lists(st.lists(st.one_of(st.just(np.nan), st.floats(-9, 9)), min_size=4, max_size=4), min_size=1, max_size=9))
def test_a_median_is_the_lower_one_of_what_is_there(rows):
    values_TL = np.array(rows)
    wanted_L = []
    for column in values_TL.T:
        there = sorted(column[~np.isnan(column)])
        wanted_L.append(there[(len(there) - 1) // 2] if there else np.nan)

    np.testing.assert_array_equal(median(values_TL), wanted_L)
    np.testing.assert_array_equal(median(values_TL[:, 0]), wanted_L[0])


def test_logarithms_of_nothing_are_missing_and_warn_nobody():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logs = log10(np.array([100.0, 0.0, -1.0, np.nan, np.inf]))

    np.testing.assert_array_equal(logs, [2, np.nan, np.nan, np.nan, np.nan])


def test_blocks_end_at_the_newest_value():
    np.testing.assert_array_equal(block_medians(np.array([9.0, 1, 2, 3, 4, 5, 6]), 3), [2, 5])


def test_a_slope_is_that_of_a_least_squares_fit():
    values = np.random.default_rng(0).standard_normal(12)

    assert slope(values) == pytest.approx(np.polyfit(np.arange(12), values, 1)[0])


def test_a_line_rises_and_a_cliff_or_a_cloud_does_not():
    line = np.arange(8.0) + 0.2 * np.random.default_rng(0).standard_normal(8)
    cliff = np.array([0.0, 0, 0, 0, 8, 8, 8, 8])
    cloud = np.array([0.0, 5, -4, 6, 1, 8, -2, 7])

    assert monotone_rise(line) == pytest.approx(7, abs=0.5)
    assert monotone_rise(-line) == pytest.approx(-7, abs=0.5)
    assert monotone_rise(cliff) == 0
    assert monotone_rise(cloud) == 0
    assert monotone_rise(np.ones(5)) == 0


def test_a_trend_is_in_standard_errors():
    rng = np.random.default_rng(0)
    chance = [trend(rng.standard_normal(100)) for _ in range(400)]

    assert np.std(chance) == pytest.approx(1, abs=0.1), "without a trend it is a standard normal number"
    assert trend(np.arange(100) + rng.standard_normal(100)) > 50
    assert trend(np.ones(9)) == 0
