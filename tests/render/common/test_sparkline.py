"""Sparklines and the strip of layers."""

import numpy as np
import pytest

from gradwatch.render.common.sparkline import ASCII, UNICODE, column, resample, sparkline, strip


def test_a_rising_series_rises():
    assert sparkline(np.arange(8.0), width=8, signs=UNICODE) == UNICODE.bars


def test_a_logarithmic_trend_shows_equal_factors_as_equal_steps():
    values = 10.0 ** np.arange(8)

    assert sparkline(values, width=8, signs=UNICODE, log=True) == UNICODE.bars


def test_noise_is_drawn_flat():
    noisy = 1.0 + 0.01 * np.cos(np.arange(12))

    assert len(set(sparkline(noisy, width=12, signs=UNICODE))) == 1


def test_a_series_longer_than_the_width_is_averaged_part_by_part():
    assert resample(np.array([0.0, 2.0, 4.0, 6.0]), 2).tolist() == [1.0, 5.0]


def test_a_kept_entry_survives_the_averaging():
    values = np.ones(1000)
    values[517] = 100.0

    drawn = resample(values, 40, keep=517)

    assert drawn[column(517, 1000, 40)] == 100.0
    assert np.count_nonzero(drawn > 50) == 1, "and it only"


@pytest.mark.parametrize("length", [5, 40, 41, 999, 1000])
def test_every_entry_lies_in_the_column_that_its_part_fills(length):
    for index in (0, length // 3, length - 1):
        marked = np.zeros(length)
        marked[index] = np.inf
        drawn = resample(marked, 40)
        assert np.flatnonzero(np.isinf(drawn)).tolist() == [column(index, length, 40)]


def test_missing_broken_and_zero_values_have_signs_of_their_own():
    values = np.array([1.0, np.nan, np.inf, 0.0, 100.0])

    drawn = sparkline(values, width=5, signs=UNICODE, log=True)

    assert drawn == UNICODE.bars[0] + " " + UNICODE.broken + UNICODE.zero + UNICODE.bars[7]


@pytest.mark.parametrize("values", [[], [np.nan, np.nan], [np.inf], [0.0, 0.0]])
def test_a_series_without_a_usable_value_is_drawn_all_the_same(values):
    for log in (False, True):
        assert len(sparkline(np.array(values), width=10, signs=UNICODE, log=log)) == len(values)


def test_the_strip_falls_one_notch_per_power_of_ten():
    norms = 0.3 * 10.0 ** -np.arange(8)[::-1]

    bars, top = strip(norms, width=20, signs=UNICODE)

    assert bars.plain == UNICODE.bars
    assert top == pytest.approx(0.3)


def test_the_strip_tells_dead_broken_and_missing_gradients_apart_without_colour():
    norms = np.array([1.0, 0.0, 1e-12, np.inf, np.nan])

    bars, _ = strip(norms, width=20, signs=ASCII)

    assert bars.plain == ASCII.bars[7] + ASCII.zero + ASCII.zero + ASCII.broken + ASCII.absent
    assert len(set(bars.plain)) == 4


def test_a_dead_layer_is_seen_in_a_strip_too_narrow_for_all():
    norms = np.ones(300)
    norms[137] = 0.0
    norms[250] = np.inf

    bars, _ = strip(norms, width=30, signs=UNICODE)

    assert len(bars.plain) == 30
    assert UNICODE.zero in bars.plain
    assert UNICODE.broken in bars.plain
