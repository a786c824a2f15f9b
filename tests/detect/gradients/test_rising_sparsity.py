"""Units that fall silent one after another, or at once."""

import numpy as np

from gradwatch.detect.gradients.rising_sparsity import RisingSparsity
from gradwatch.history.synthetic.builder import Synthetic


def found(dead_T):
    made = Synthetic(steps=200, activations=1)
    made.dead_frac_TA[:, 0] = dead_T
    (finding,) = RisingSparsity().detect(made.history())
    return finding


def test_a_gradual_rise_is_reported_as_one():
    assert found(np.linspace(0.05, 1.0, 200)).message.startswith("more and more units of acts.0 are dead: ")


def test_most_units_that_fell_silent_at_once_are_reported_with_their_step():
    steps_T = np.arange(200)
    finding = found(np.where(steps_T < 100, 0.05 + 0.0005 * steps_T, 0.9 + 0.0009 * (steps_T - 100)))

    assert "fell silent at once, at step 100: " in finding.message
    assert finding.since == 100
