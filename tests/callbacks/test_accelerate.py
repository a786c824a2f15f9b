"""A loop with Accelerate is watched through the wrappers that `prepare` returns."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

import gradwatch
from gradwatch.errors import GradwatchError

STEPS, ACCUMULATE, LIMIT = 5, 3, 0.05


def test_steps_losses_and_norms_are_those_of_the_loop():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses, norms = [], []
    with gradwatch.watch(model, optimizer, accumulate=ACCUMULATE) as monitor:
        for _ in range(STEPS * ACCUMULATE):
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(torch.randn(8, 6)), torch.randint(0, 3, (8,)))
                losses.append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    monitor.observe(optimizer)
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), LIMIT)))
                optimizer.step()
                optimizer.zero_grad()
                monitor.step(loss)

    history = monitor.history
    np.testing.assert_allclose(history["loss"], np.reshape(losses, (STEPS, ACCUMULATE)).mean(1), rtol=1e-6)
    np.testing.assert_allclose(history["grad_norm.before_clip"], norms, rtol=1e-5)
    np.testing.assert_allclose(history["grad_norm.after_clip"], [LIMIT] * STEPS, rtol=1e-3)
    assert np.isfinite(history["update.ratio"][0]).all(), "the update is that of the optimizer inside"


class Wrapper(torch.optim.Optimizer):
    """Never was initialised as an optimizer, and wraps what it is told to."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_an_optimizer_that_takes_no_hooks_and_wraps_none_is_named():
    with pytest.raises(GradwatchError, match=r"Wrapper takes no hooks; have Wrapper.__init__ call"):
        gradwatch.watch(nn.Linear(2, 1), Wrapper(None))


def test_a_wrapper_in_a_wrapper_is_followed_to_what_takes_hooks():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with gradwatch.watch(model, Wrapper(Wrapper(optimizer))) as monitor:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        monitor.step(1.0)

    assert np.isfinite(monitor.history["grad.l2"]).all()


def test_clipping_by_accelerate_is_noticed():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    norms = []
    with gradwatch.watch(model, optimizer, accumulate=ACCUMULATE) as monitor:
        for _ in range(STEPS * ACCUMULATE):
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(torch.randn(8, 6)), torch.randint(0, 3, (8,)))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), LIMIT)))
                optimizer.step()
                optimizer.zero_grad()
                monitor.step(loss)

    np.testing.assert_allclose(monitor.history["grad_norm.before_clip"], norms, rtol=1e-5)
    np.testing.assert_allclose(monitor.history["grad_norm.after_clip"], [LIMIT] * STEPS, rtol=1e-3)
