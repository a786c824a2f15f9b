"""A validation loss that rises while it wavers is found by its trend; one that only wavers is not."""

import math

import numpy as np
import pytest

from gradwatch.detect.data_and_loss.overfitting import Overfitting, chance_of_trend
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


def test_validations_in_random_order_have_a_trend_as_often_as_is_claimed():
    rng = np.random.default_rng(0)
    chances = np.array([chance_of_trend(rng.standard_cauchy(9)) for _ in range(4000)])

    for chance in (0.2, 0.05, 0.01):
        assert np.mean(chances <= chance) <= chance + 3 * math.sqrt(chance / len(chances))
    assert chance_of_trend(np.arange(9.0)) == pytest.approx(1 / math.factorial(9)), "one order of all"
    assert chance_of_trend(np.ones(9)) == pytest.approx(1), "equal values have no trend"


def test_however_many_validations_waver_about_their_best_nothing_is_found():
    steps = 1000
    made = Synthetic(steps=steps, seed=0)
    made.loss_T = 2.3 * np.exp(-made.t_T / 300)
    found = []
    for seed in range(3):
        noise_T = np.random.default_rng(seed).standard_normal(steps)
        made.val_loss_T = np.exp(0.2 * noise_T) * (made.t_T % 10 == 9) + np.where(made.t_T % 10 == 9, 0.0, np.nan)
        found += [f for end in range(100, steps, 100) for f in Overfitting().detect(made.history(until=end))]

    assert found == []
