"""Sequential tests: on series that they must not report, they err no more often than they state."""

import numpy as np
import pytest

from gradwatch.detect.features.sequential_test import (
    ALPHA,
    SequentialTest,
    aligned_blocks,
    allowed_error,
    critical_sigmas,
    stall_likelihood_ratio,
)

SERIES, BLOCKS = 4000, 40


def largest_evidence(series_SB):
    """Return the largest evidence of each series after any block."""
    return np.array(
        [max(stall_likelihood_ratio(series_B[:b], rate=0.5) for b in range(2, BLOCKS)) for series_B in series_SB]
    )


def falling(rng, *, rate):
    """Return a series that sets a new low with a given chance at each block, and is noise above it otherwise."""
    low_B = np.cumsum(rng.random(BLOCKS) < rate)
    is_low_B = np.diff(low_B, prepend=0) > 0
    return -low_B + np.where(is_low_B, 0.0, rng.random(BLOCKS) * 5 + 0.5)


def test_a_series_that_falls_every_second_time_is_hardly_ever_taken_for_flat():
    rng = np.random.default_rng(0)

    evidence_S = largest_evidence([falling(rng, rate=0.5) for _ in range(SERIES)])

    for alpha in (0.1, 0.01):
        assert 0 < np.mean(evidence_S >= 1 / alpha) <= alpha + 3 * np.sqrt(alpha / SERIES)


@pytest.mark.parametrize("noise", ["normal", "cauchy", "uniform"])
def test_a_flat_series_is_found_whatever_its_noise(noise):
    rng = np.random.default_rng(1)
    draw = {"normal": rng.standard_normal, "cauchy": rng.standard_cauchy, "uniform": rng.random}[noise]

    evidence_S = largest_evidence([draw(BLOCKS) for _ in range(1000)])

    assert np.mean(evidence_S >= 100) > 0.99


def test_a_steady_fall_is_never_evidence_of_a_stall():
    assert max(stall_likelihood_ratio(-np.arange(b, dtype=float), rate=0.5) for b in range(2, BLOCKS)) <= 1


def test_a_block_is_the_same_at_every_look():
    values_T = np.random.default_rng(2).standard_normal(100)

    looks = [aligned_blocks(values_T[5:end], 5, 8) for end in range(5, 100)]

    for look in looks:
        assert (look == looks[-1][: len(look)]).all()
    assert len(looks[0]) == 0
    assert looks[-1][0] == np.sort(values_T[8:16])[3]


def test_the_tests_together_spend_the_budget_over_all_looks_and_no_more():
    looks = range(1, 5001)
    spent = sum(7 * allowed_error(test, look, among=7) for test in SequentialTest for look in looks)

    assert spent < ALPHA
    assert spent == pytest.approx(ALPHA * (1 - 1 / 5001)), "the sum of 1 / (k (k + 1)) telescopes"


def test_a_normal_statistic_passes_its_bound_as_often_as_it_may():
    values = np.abs(np.random.default_rng(3).standard_normal(200_000))

    assert np.mean(values > critical_sigmas(0.01)) == pytest.approx(0.02, rel=0.1), "on both sides"
