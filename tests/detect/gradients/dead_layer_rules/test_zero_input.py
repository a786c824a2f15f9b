"""A layer whose input becomes zero is found, and a fit without noise costs no look at the past."""

from gradwatch.detect.gradients.dead_layer_rules.examples import make_zero_input
from gradwatch.detect.gradients.dead_layer_rules.zero_input import find_zero_inputs
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.history.table import Table


def found(history):
    return [sign.layer for sign in find_zero_inputs(history, kind="dead-layer", steps=10)]


def test_a_layer_without_an_input_is_found():
    made = make_zero_input()

    assert found(made.history()) == [*made.names(10)]


def test_gradients_that_are_all_zero_are_not_followed_back(monkeypatch):
    made = Synthetic(steps=100)
    made.grad_l2_TL[50:] = 0
    history = made.history()
    monkeypatch.setattr(Table, "series", None)

    assert found(history) == []
