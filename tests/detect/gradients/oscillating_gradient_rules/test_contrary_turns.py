"""Gradients of turns oppose each other at the period of the turns; noise and a common part do not."""

import numpy as np
import pytest

from gradwatch.detect.gradients.oscillating_gradient_rules.contrary_turns import opposing_share

STEPS, LAYERS = 96, 8


def share_of(cosine_T):
    """Return period and share for gradients of unit norm with these cosines, and some noise."""
    noise_TL = 0.1 * np.random.default_rng(0).standard_normal((STEPS, LAYERS))
    numel_L = np.full(LAYERS, 64.0)
    return opposing_share((cosine_T[:, None] + noise_TL) / 8, np.ones((STEPS, LAYERS)), numel_L)


@pytest.mark.parametrize("period", [2, 3, 4, 6])
def test_turns_are_found_at_their_period(period):
    found, share = share_of(0.3 * np.cos(2 * np.pi * np.arange(STEPS) / period))

    assert found == period
    assert share > 0.5


def test_random_batches_and_a_common_direction_show_nothing():
    assert share_of(np.zeros(STEPS))[1] < 0.02
    assert share_of(np.full(STEPS, 0.5))[1] < 0.02


def test_tensors_without_a_gradient_are_left_out():
    nothing_TL = np.zeros((STEPS, LAYERS))

    assert opposing_share(nothing_TL, nothing_TL, np.full(LAYERS, 64.0)) == (1, 0.0)
