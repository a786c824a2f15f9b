"""A single matrix that an update replaces is found, with its name; what was meant to be replaced is not."""

import numpy as np
import pytest

from gradwatch.detect.updates.learning_rate_too_high_rules.examples import make_own_rate
from gradwatch.detect.updates.learning_rate_too_high_rules.overwritten_matrix import find_overwritten_matrix
from gradwatch.history.synthetic.builder import Synthetic


def signs(history, *, every=60):
    return list(find_overwritten_matrix(history, ratio=1.0, every=every, lead=10.0, matrices=3))


@pytest.mark.parametrize("factor", [100.0, 1e3, 1e5])
def test_a_matrix_that_an_update_replaces_is_named(factor):
    history, names = make_own_rate(factor=factor)

    assert [sign.layer for sign in signs(history)] == list(names)


def test_a_matrix_that_began_near_zero_is_no_news():
    assert signs(make_own_rate(factor=1e3, first=1e-3)[0]) == []


def test_updates_that_replace_all_matrices_are_no_exception():
    made = Synthetic(steps=60)
    made.update_factor_TL[:] = 1e4

    assert signs(made.history()) == []


def test_a_matrix_that_other_code_moves_is_no_news():
    made = Synthetic(steps=60, lr=0.01)
    made.update_factor_TL[:, 4] *= 1e3
    made._change(4, group=None)

    assert signs(made.history()) == []


def test_updates_that_are_not_finite_are_no_news():
    made = Synthetic(steps=60, lr=0.01)
    made.update_factor_TL[:, 4] = np.inf

    assert signs(made.history()) == []


def test_a_matrix_in_front_of_a_normalization_sets_its_own_rate():
    made = Synthetic(steps=60, lr=0.01).own_rate(4, factor=1e3)
    made._change(5, module_type="BatchNorm1d")

    assert signs(made.history()) == []
