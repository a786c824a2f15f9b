"""Layers that are skipped more and more, and then always, are found; layers of another schedule are not."""

import numpy as np
import pytest

from gradwatch.detect.gradients.dead_layer_rules.faded import find_faded
from gradwatch.history.synthetic.builder import Synthetic

T = np.arange(400)
BOUNDS = {"gone": 40, "steps": 48, "first_share": 0.5, "last_ratio": 0.5}


def faded(skip_T, *, missing=np.nan, seed=0, steps=400):
    made = Synthetic(steps=steps, seed=seed)
    made.grad_l2_TL[made.rng.random(steps) < skip_T[:steps], 5] = missing
    return [sign.layer for sign in find_faded(made.history(), kind="dead-layer", every=10, **BOUNDS)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("missing", [np.nan, 0.0], ids=["None", "zero"])
@pytest.mark.parametrize("skip_T", [T / 100, T / 200, np.repeat(np.arange(20) / 8, 20)], ids=["100", "200", "stairs"])
def test_a_rate_of_skipping_that_rises_to_one_is_found(skip_T, missing, seed):
    assert faded(skip_T, missing=missing, seed=seed) == ["layers.5.weight"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "skip_T",
    [
        np.minimum(T / 100, 0.9),
        np.full(400, 0.8),
        T >= 200,
        np.where(T < 200, 0.5, 1.0),
        T % 100 >= 50,
        np.zeros(400),
    ],
    ids=["rises to 0.9", "constant", "a task ends", "a task in turn ends", "stretches", "never"],
)
def test_other_ways_of_skipping_are_no_news(skip_T, seed):
    assert faded(skip_T, seed=seed) == []


def test_a_layer_is_found_soon_after_its_last_gradient():
    found = [steps for steps in range(100, 200, 10) if faded(T / 100, steps=steps)]

    assert found[0] <= 140
