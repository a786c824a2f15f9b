"""Two kinds of values in turn are further apart than a rank sum of random values is."""

import dataclasses
import math

import numpy as np
import pytest

from gradwatch.detect.gradients.oscillating_gradient_rules.alternating_sources import (
    PHASES,
    find_drowned_source,
    rank_sum_by_phase,
)
from gradwatch.detect.gradients.oscillating_gradient_rules.examples import make_two_sources
from gradwatch.detect.gradients.oscillating_gradient_rules.window import WINDOW_STEPS

BOUNDS = {"decades": 1.0, "drowned_decades": 2.5, "unlearned_frac": 0.9, "unlearning": 3.0, "task_ratio": 3.0}


@pytest.mark.parametrize("side", [-1, 1])
@pytest.mark.parametrize("period", [2, 3, 4])
def test_a_source_that_is_apart_from_all_others_has_one_of_all_orders(period, side):
    values_T = np.random.default_rng(0).random(WINDOW_STEPS)
    values_T[np.arange(WINDOW_STEPS)[::-1] % period == 1] += 2 * side

    sums = rank_sum_by_phase(values_T)

    k = PHASES.index((period, 1))
    assert sums.chance_K[k] == pytest.approx(1 / math.comb(WINDOW_STEPS, WINDOW_STEPS // period))
    assert sums.is_low_K[k] == (side < 0)
    assert PHASES[int(sums.chance_K.argmin())][0] == period


def test_rank_sums_of_random_values_are_as_rare_as_they_claim():
    rng = np.random.default_rng(0)
    chances = np.concatenate([rank_sum_by_phase(rng.standard_cauchy(WINDOW_STEPS)).chance_K for _ in range(1000)])

    for chance in (0.1, 0.01):  # of one side, and there are two
        assert np.mean(chances <= chance) == pytest.approx(2 * chance, rel=0.25)


def test_several_optimizers_play_a_game_and_are_no_sources():
    made = make_two_sources(learned=0.95, apart=40)
    assert find_drowned_source(made.history(), every=10, **BOUNDS)

    made.info = dataclasses.replace(made.info, optimizer="Adam+Adam")
    assert find_drowned_source(made.history(), every=10, **BOUNDS) is None
