"""A validation loss that rises while it wavers is found by its trend; one that only wavers is not."""

import numpy as np
import pytest

from gradwatch.detect.data_and_loss.overfitting import Overfitting
from gradwatch.history.synthetic.builder import Synthetic


def findings(*, rise, noise, every=10, seed=0, steps=300):
    made = Synthetic(steps=steps, seed=seed)
    at_T, after_T = made.t_T % every == every - 1, np.maximum(made.t_T - 60, 0) / (steps - 60)
    level_T = (1 + np.exp(-made.t_T / 15)) * (1 + rise * after_T)
    made.val_loss_T[at_T] = (level_T * np.exp(noise * made.rng.standard_normal(steps)))[at_T]
    return [
        finding for history in made.replay() if history.step % 20 == 19 for finding in Overfitting().detect(history)
    ]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("rise", "noise"), [(0.19, 0.01), (0.25, 0.03)])
def test_a_rise_among_wavering_validations_is_found(rise, noise, seed):
    assert findings(rise=rise, noise=noise, seed=seed)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("rise", "noise"), [(0.0, 0.05), (0.05, 0.02)])
def test_validations_that_waver_without_a_rise_that_counts_are_no_news(rise, noise, seed):
    assert findings(rise=rise, noise=noise, seed=seed) == []
