"""Parts whose gradients outgrow the rest are found; parts that differ from the start, or a rest that dies, are not."""

import numpy as np
import pytest

from gradwatch.detect.gradients.layer_imbalance_rules.growing_group import find_growing_group
from gradwatch.history.synthetic.builder import Synthetic

BOUNDS = {"decades": 2.5, "steps": 10, "size": 2, "first_decades": 1.0, "rest_fall_decades": 1.0}


def outgrown(factor_T, *, part=slice(3), seed=0):
    made = Synthetic(steps=len(factor_T), seed=seed)
    made.grad_l2_TL[:, part] *= factor_T[:, None]
    return [sign.layer for sign in find_growing_group(made.history(), kind="layer-imbalance", **BOUNDS)]


T = np.arange(120)
NAMES = [f"layers.{i}.weight" for i in range(3)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("factor_T", [1 + 100.0 * T, 1.12**T, 2.0 ** (T // 8)], ids=["linear", "compounding", "stairs"])
def test_a_weight_that_grows_without_bound_is_found(factor_T, seed):
    assert outgrown(factor_T, seed=seed) == NAMES


@pytest.mark.parametrize(
    "factor_T",
    [np.minimum(1 + T, 50.0), np.full(120, 1e4), 1e4 * 1.02**T, np.where(T == 119, 1e4, 1.0), np.ones(120)],
    ids=["annealed to 50", "large from the start", "large and larger", "a spike", "even"],
)
def test_other_weights_are_no_news(factor_T):
    assert outgrown(factor_T) == []


def test_a_rest_that_loses_its_gradients_does_not_make_the_part_grow():
    assert outgrown(0.9**T, part=slice(3, None)) == []


def test_a_single_layer_is_no_part():
    assert outgrown(1.12**T, part=slice(1)) == []
