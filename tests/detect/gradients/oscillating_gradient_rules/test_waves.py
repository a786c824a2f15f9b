"""A swing is measured without the trend."""

import numpy as np
import pytest

from gradwatch.detect.gradients.oscillating_gradient_rules.waves import oscillation


@pytest.mark.parametrize("trend", [0.0, 0.5])
def test_a_slow_wave_correlates_and_crosses_twice_a_period(trend):
    place_T = np.arange(48)

    spread, correlation, crossings = oscillation(np.sin(2 * np.pi * (place_T + 0.5) / 12) + trend * place_T)

    assert spread == pytest.approx(2, abs=0.3)
    assert correlation > 0.7
    assert crossings in (7, 8)


def test_alternation_is_anticorrelated_and_noise_is_uncorrelated():
    rng = np.random.default_rng(0)
    noise = [oscillation(rng.standard_normal(48))[1] for _ in range(300)]

    assert oscillation(np.tile([1.0, -1.0], 24))[1] < -0.9
    assert np.std(noise) == pytest.approx(0.14, abs=0.02)
    assert oscillation(np.ones(48)) == (0.0, 0.0, 0)
