"""Jumps of a loss count where they are equally far apart over all of the window."""

import numpy as np
import pytest

from gradwatch.detect.gradients.oscillating_gradient_rules.stretches import jump_period


def losses(*jumps, steps=96):
    """Return a loss of 0.1 with a step up to 1 at each jump, and a fall back over two steps."""
    loss_T = np.full(steps, 0.1)
    loss_T[list(jumps)] = 1.0
    return loss_T


@pytest.mark.parametrize("length", [3, 10, 24])
def test_even_jumps_have_a_period(length):
    assert jump_period(losses(*range(length - 1, 96, length)), high=0.9, low=0.3) == length


def test_uneven_few_or_slow_jumps_have_none():
    assert jump_period(losses(10, 20, 31, 41, 51, 61, 71, 81, 91), high=0.9, low=0.3) is None, "one step late"
    assert jump_period(losses(30, 60, 90), high=0.9, low=0.3) is None, "only three"
    assert jump_period(losses(*range(1, 96, 2)), high=0.9, low=0.3) is None, "too short to fall"
    assert jump_period(losses(40, 50, 60, 70), high=0.9, low=0.3) is None, "they have ended"
    assert jump_period(np.linspace(0.1, 1, 96), high=0.9, low=0.3) is None, "it does not jump"
