"""An operation on one line can be kept away from its singular point, forward and backward."""

import pytest
import torch

from gradwatch.replay.locate.locate import locate
from gradwatch.replay.verify.numeric_guard import FIRST, NumericGuard


def at_zero(x):
    return torch.where(x > 0, x.sqrt(), 0.0)


def divided(x):
    return x / x.sum()


def inverse(x):
    return 1 / x


def on_the_edge(x):
    return torch.acos(x + 1)


def overflowing(x):
    return (x + 1000).exp()


FORMULAS = [at_zero, divided, inverse, on_the_edge, overflowing]


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda f: f.__name__)
def test_a_guarded_formula_is_finite_forward_and_backward(formula):
    x = torch.zeros(3, requires_grad=True)
    located = locate(lambda: formula(x).sum())

    with NumericGuard(located.place) as guard:
        y = formula(x)
    y.sum().backward()

    assert guard.guarded, "the operation is known"
    assert torch.isfinite(y).all()
    assert torch.isfinite(x.grad).all()


def test_other_lines_are_left_alone():
    x = torch.zeros(3, requires_grad=True)
    place = locate(lambda: at_zero(x).sum()).place

    with NumericGuard(place) as guard:
        other = x.log()

    assert not guard.guarded
    assert torch.isneginf(other).all()


@pytest.mark.parametrize("name", FIRST)
def test_a_guard_keeps_what_is_far_from_the_singular_point(name):
    x = torch.tensor([0.25, 0.5])

    assert torch.equal(FIRST[name](x), x)
