"""Rates that grow by a factor without end are found once they stop to help; warm-ups of any form are not."""

import numpy as np
import pytest

from gradwatch.detect.updates.learning_rate_too_high_rules.compounding_rate import find_compounding_rate
from gradwatch.history.synthetic.builder import Synthetic

T = np.arange(200)


def sign(rate_T, *, loss_T=None, seed=0):
    made = Synthetic(steps=len(rate_T), seed=seed)
    made.lr_T = 1e-3 * rate_T
    fall_T = np.maximum(np.exp(-T[: len(rate_T)] / 10), 0.1) if loss_T is None else loss_T
    made.loss_T = 2.3 * fall_T * np.exp(0.03 * made.rng.standard_normal(len(rate_T)))
    return find_compounding_rate(made.history(), compound=10.0, learned=0.5, half=0.45, fall=0.03)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rate_T", [1.02**T, 1.04**T, 1.1**T, 1.5 ** (T // 10)], ids=["2%", "4%", "10%", "stairs"])
def test_a_rate_that_compounds_after_the_run_has_learned_is_found(rate_T, seed):
    assert sign(rate_T, seed=seed)


@pytest.mark.parametrize(
    "rate_T",
    [
        np.minimum(1 + T, 150.0),
        0.1 + 0.5 * (1 - np.cos(np.pi * np.minimum(T / 199, 1))),
        np.minimum(1.05**T, 100.0),
        np.where(T < 100, 1.0, 30.0),
        np.ones(200),
        0.97**T,
    ],
    ids=["linear", "cosine", "exponential until step 95", "one jump", "constant", "decay"],
)
@pytest.mark.parametrize("steps", [120, 200])
def test_other_schedules_are_no_news(rate_T, steps):
    assert sign(rate_T[:steps]) is None


def test_an_exponential_warm_up_that_lowers_the_loss_is_no_news():
    assert sign(1.05**T, loss_T=np.exp(-T / 60)) is None


def test_a_rate_that_compounds_before_anything_is_learned_is_a_warm_up():
    assert sign(1.05**T, loss_T=np.ones(200)) is None
