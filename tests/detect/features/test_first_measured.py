"""A gradient scaler skips the first steps of many runs, so the start of a run is the first step that is measured."""

import numpy as np

from gradwatch.detect.data_and_loss.loss_plateau import LossPlateau
from gradwatch.detect.features.baseline import first_measured
from gradwatch.detect.updates.learning_rate_too_low import LearningRateTooLow
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.history.synthetic.edit import with_statistic


def skipped_at_first(made, *, steps=5):
    """Return the history of a run whose first steps measured no weights and no updates."""
    made.loss_T = 2.3 * np.exp(0.03 * made.rng.standard_normal(made.steps))
    history = made.history()
    for name in ("weight.l2", "update.ratio"):
        values_TL = np.array(history[name])
        values_TL[:steps] = np.nan
        history = with_statistic(history, name, values_TL, missing=True)
    return history


def test_the_first_measured_weights_are_those_after_the_skipped_steps():
    made = Synthetic(steps=40)
    measured = first_measured(skipped_at_first(made), "weight.l2")

    assert np.isfinite(measured).all()
    assert (measured > 0).all()


def test_a_rate_that_is_too_low_is_found_after_skipped_steps(replay):
    (found,) = replay(skipped_at_first(Synthetic(steps=60, lr=1e-8)), [LearningRateTooLow()])
    assert found.kind == "learning-rate-too-low"


def test_weights_that_decay_away_are_found_after_skipped_steps(replay):
    made = Synthetic(steps=120)
    made.weight_l2_TL *= 10 ** (-3 * np.minimum(made.t_T / 100, 1.0))[:, None]
    (found,) = replay(skipped_at_first(made), [LossPlateau()])
    assert "shrink the weights" in found.message
