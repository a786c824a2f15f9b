"""Two kinds of values in turn are further apart than a rank sum of random values is."""

import dataclasses

import numpy as np
import pytest

from gradwatch.detect.gradients.oscillating_gradient_rules.alternating_sources import (
    MIN_RANK_SUM_SIGMAS,
    PHASES,
    find_drowned_source,
    rank_sum_by_phase,
)
from gradwatch.detect.gradients.oscillating_gradient_rules.examples import make_two_sources
from gradwatch.detect.gradients.oscillating_gradient_rules.window import WINDOW_STEPS


@pytest.mark.parametrize("period", [2, 3, 4])
def test_the_phase_of_a_source_stands_out_from_all_phases(period):
    values_T = np.random.default_rng(0).random(WINDOW_STEPS)
    values_T[np.arange(WINDOW_STEPS)[::-1] % period == 1] += 2

    sigmas_K = rank_sum_by_phase(values_T)

    assert sigmas_K[PHASES.index((period, 1))] > MIN_RANK_SUM_SIGMAS
    assert PHASES[int(np.abs(sigmas_K).argmax())][0] == period


def test_rank_sums_of_random_values_are_standard_normal_numbers():
    rng = np.random.default_rng(0)
    sigmas_K = np.concatenate([rank_sum_by_phase(rng.standard_cauchy(WINDOW_STEPS)) for _ in range(500)])

    assert np.std(sigmas_K) == pytest.approx(1, abs=0.05)
    assert np.abs(sigmas_K).max() < MIN_RANK_SUM_SIGMAS


def test_several_optimizers_play_a_game_and_are_no_sources():
    made = make_two_sources(learned=0.95, apart=40)
    assert find_drowned_source(made.history(), decades=1.0)

    made.info = dataclasses.replace(made.info, optimizer="Adam+Adam")
    assert find_drowned_source(made.history(), decades=1.0) is None
