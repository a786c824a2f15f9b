"""A loop that moves its weights by hand, without an optimizer, is watched like any other."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradwatch
from gradwatch import Schedule
from gradwatch.events import LEFT_OUT

STEPS = 40


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def train(model, monitor=None, *, clear=lambda model: model.zero_grad(), micro_batches=1, by_backward=True):
    """Train as tutorials do, and return the norms of the gradients of the first weight."""
    norms = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for _ in range(micro_batches):
            x = torch.randn(32, 8, generator=generator)
            loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
            if by_backward:
                loss.backward()
        gradients = [p.grad for p in model.parameters()]
        if not by_backward:
            gradients = torch.autograd.grad(loss, list(model.parameters()))
        norms.append(gradients[0].norm().item())
        with torch.no_grad():
            for param, gradient in zip(model.parameters(), gradients, strict=True):
                param -= 0.05 * gradient
        clear(model)
        if monitor:
            monitor.step(loss, batch=x)
    return norms


def overwrite(model):
    for param in model.parameters():
        param.grad.zero_()


@pytest.mark.parametrize("clear", [lambda model: model.zero_grad(), overwrite])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_and_updates_are_read_and_the_training_is_unchanged(clear, micro_batches):
    model = make()
    expected = copy.deepcopy(model)
    norms = train(expected, clear=clear, micro_batches=micro_batches)

    with gradwatch.watch(model, [], schedule=Schedule(updates=1)) as monitor:
        train(model, monitor, clear=clear, micro_batches=micro_batches)

    history = monitor.history
    np.testing.assert_allclose(history["grad.l2"][:, 0], norms, rtol=1e-5)
    assert (history["update.ratio"][:, 0] > 0).all()
    assert not history["skipped"].any()
    assert np.isnan(history["lr.0"]).all()
    assert history.info.optimizer == ""
    assert not history.findings
    assert not [event for event in history.events if event.kind == LEFT_OUT.name]
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert not one._post_accumulate_grad_hooks, "no hook is left"


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_that_are_never_cleared_are_found(micro_batches):
    model = make()
    with gradwatch.watch(model, []) as monitor:
        train(model, monitor, clear=lambda model: None, micro_batches=micro_batches)

    assert "missing-zero-grad" in {finding.kind for finding in monitor.findings()}


def test_gradients_that_no_backward_pass_leaves_are_unknown():
    model = make()
    with gradwatch.watch(model, []) as monitor:
        train(model, monitor, by_backward=False)

    assert np.isnan(monitor.history["grad.l2"]).all()
    assert not monitor.findings()


def test_a_model_without_trainable_parameters_is_watched():
    model = make().requires_grad_(False)
    with gradwatch.watch(model, []) as monitor:
        for _ in range(STEPS):
            monitor.step(model(torch.randn(4, 8)).mean())

    assert len(monitor.history["loss"]) == STEPS
    assert not monitor.attempts.left_out
