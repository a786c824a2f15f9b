"""Dead and saturated are where the slope of the function is flat."""

import pytest
import torch
from torch import nn

from gradwatch.probe.activations.rules import FLAT, rules_of


def slope(module, x):
    """Outputs and their derivatives in double precision."""
    x = x.double().requires_grad_()
    y = module.double()(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    return y.detach(), gradient


SMOOTH = [nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU(), nn.Mish(), nn.ELU(2.0), nn.SELU(), nn.CELU(0.5)]


@pytest.mark.parametrize("module", SMOOTH, ids=str)
def test_dead_units_of_smooth_functions_sit_where_the_slope_is_flat(module):
    y, gradient = slope(module, torch.linspace(-15, 5, 200001))
    low, high = rules_of(module).dead

    flat = gradient.abs() < FLAT * gradient.max()
    tail = (y >= low) & (y <= high) & (torch.arange(len(y)) < y.argmin() if high == 0 else True)

    assert flat[tail].double().mean() > 0.999, "the tail is flat"
    assert tail[: int(flat.logical_not().nonzero()[0])].double().mean() > 0.98, "and all that is flat is in it"


@pytest.mark.parametrize("module", [nn.Sigmoid(), nn.Tanh(), nn.Hardsigmoid(), nn.Hardtanh(-2.0, 0.5)], ids=str)
def test_saturated_is_where_the_slope_is_below_a_twentieth_of_its_maximum(module):
    x = torch.linspace(-6.001, 6, 6000)
    _, gradient = slope(module, x)
    expected = (gradient < FLAT * gradient.max()).double().mean()

    rules = rules_of(module)
    low, high = rules.saturated
    y = module.float()(x)
    saturated = ((y <= low) | (y >= high)).double().mean()

    assert float(saturated) == pytest.approx(float(expected), abs=1e-3), "the fraction of flat outputs"
    assert rules.dead is None, "such units saturate, they do not die"


@pytest.mark.parametrize("module", [nn.Linear(2, 2), nn.Identity(), nn.Dropout(), nn.BatchNorm1d(2)], ids=str)
def test_other_modules_have_no_rules(module):
    assert rules_of(module) is None, "no activation"


def test_relu6_saturates_at_its_upper_bound_and_relu_nowhere():
    x = torch.tensor([-1.0, 3.0, 6.0, 9.0])

    low, high = rules_of(nn.ReLU6()).saturated
    y = nn.ReLU6()(x)

    assert ((y <= low) | (y >= high)).tolist() == [False, False, True, True], "two of four are at 6"
    assert rules_of(nn.ReLU()).saturated is None, "the notion does not apply"
