"""A gradient that shrinks evenly to zero is annealed; one that ends at once, gets sparser or rounds to zero is not."""

import numpy as np
import pytest

from gradwatch.detect.gradients.dead_layer import DeadLayer
from gradwatch.detect.gradients.dead_layer_rules.annealed import is_annealed
from gradwatch.detect.gradients.dead_layer_rules.examples import make_annealed
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.history.synthetic.edit import with_statistic

LAYER = 11
BOUNDS = {"ratio": DeadLayer().annealed, "decades": DeadLayer().decades}


def shrinking(size_of):
    made = Synthetic(steps=120)
    made.grad_l2_TL[:, LAYER] *= [size_of(step) for step in made.t_T]
    return made.history()


@pytest.mark.parametrize(
    "size_of",
    [lambda step: max(0.0, 1 - step / 60), lambda step: 0.5 * (1 + np.cos(np.pi * min(step / 60, 1)))],
    ids=["linear", "cosine"],
)
def test_a_weight_on_a_schedule_is_recognized(size_of):
    assert is_annealed(shrinking(size_of), [LAYER], **BOUNDS)


@pytest.mark.parametrize(
    "size_of",
    [
        lambda step: float(step < 60),
        lambda step: 10.0**-step if step < 40 else 0.0,
        lambda step: max(0.0, 1 - step / 12),
    ],
    ids=["at once", "until it rounds to zero", "too soon to tell"],
)
def test_other_ends_are_not(size_of):
    assert not is_annealed(shrinking(size_of), [LAYER], **BOUNDS)


def test_a_gradient_that_loses_its_elements_is_not_annealed():
    made = make_annealed()
    history = with_statistic(made.history(), "grad.zero_frac", np.minimum(made.t_T / 60, 1)[:, None], layers=(LAYER,))

    assert not is_annealed(history, [LAYER], **BOUNDS)
