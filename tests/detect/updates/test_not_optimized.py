"""Weights that stop are reported, but not if their optimizer has nothing left to update."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradwatch
from gradwatch.detect.updates.not_optimized import NotOptimized
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.monitor import Schedule


def fit_by_lbfgs(*, gives_up_at=None):
    """Fit a curve, and return the number of steps since the weights moved, and what is said not to be optimized.

    Args:
        gives_up_at: Step from which the tolerance is so large that the optimizer takes any gradient for convergence.
    """
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 32)[:, None]
    y = torch.sin(3 * x)
    model = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=10, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) + 0.01 * sum((p**2).sum() for p in model.parameters())
        loss.backward()
        return loss

    still = 0
    with gradwatch.watch(model, optimizer, schedule=Schedule(budget=0)) as monitor:
        for step in range(50):
            if step == gives_up_at:
                optimizer.param_groups[0]["tolerance_grad"] = 100.0
            before = [p.detach().clone() for p in model.parameters()]
            loss = optimizer.step(closure)
            still = still + 1 if all(map(torch.equal, before, model.parameters())) else 0
            monitor.step(loss, batch=x)
    return still, [str(f.severity) for f in monitor.findings() if f.kind == "not-optimized"]


def test_an_optimizer_that_has_converged_is_done():
    still, found = fit_by_lbfgs()

    assert still > 20, "L-BFGS stops by its own tolerance"
    assert found == []


@pytest.mark.parametrize("step", [0, 2])
def test_one_that_stops_far_from_a_minimum_is_not(step):
    still, found = fit_by_lbfgs(gives_up_at=step)

    assert still == 50 - step
    assert found == ["critical"]


def test_a_layer_left_out_is_found_though_its_gradient_overflowed_once(replay):
    made = Synthetic(steps=20)
    *held, last = made.info.layers
    made.info = replace(made.info, layers=(*held, replace(last, group=None)))
    made.grad_l2_TL[:, 11], made.nonfinite_TL[:, 11], made.update_factor_TL[:, 11] = float("nan"), 8, 0

    (found,) = replay(made.history(), [NotOptimized()])

    assert found.layer == "layers.11.weight"
