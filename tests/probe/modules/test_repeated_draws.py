"""Steps that begin with the same seed and draw random numbers are reported; other calls of `manual_seed` are not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradwatch
from gradwatch.events import DRAWS_REPEATED
from gradwatch.probe.modules.repeated_draws import SEEDINGS


def trained(seed, *, rate=0.2, steps=60):
    """Train with `seed(step)` before each step; return the reported numbers of steps, and the findings."""
    torch.manual_seed(0)
    x = torch.randn(steps, 32, 6)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(rate), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for step in range(steps):
            seed(step)
            loss = F.cross_entropy(model(x[step]), x[step, :, :3].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=x[step])
    assert SEEDINGS._original is None, "the function of torch is back"
    events = [event for event in monitor.history.events if event.kind == DRAWS_REPEATED.name]
    return [event.values["steps"] for event in events], [finding.kind for finding in monitor.findings()]


def test_the_same_seed_at_each_step_is_reported():
    found, findings = trained(lambda _: torch.manual_seed(42))

    assert found
    assert found[0] >= 16
    assert findings == ["constant-batch"]


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(lambda step: None, id="never"),
        pytest.param(lambda step: torch.manual_seed(step), id="another seed each time"),
        pytest.param(lambda step: torch.manual_seed(42) if step % 20 == 0 else None, id="each epoch"),
        pytest.param(lambda step: torch.manual_seed(42) if step < 10 else None, id="a few times"),
    ],
)
def test_other_seeds_are_not(seed):
    assert trained(seed) == ([], [])


def test_a_step_that_draws_nothing_is_not():
    assert trained(lambda _: torch.manual_seed(42), rate=0.0) == ([], [])


def test_calls_without_updates_between_them_are_not():
    def seed(step):
        if step == 5:
            for _ in range(40):  # as an evaluation does that compares samples
                torch.manual_seed(42)
                torch.randn(3)

    assert trained(seed) == ([], [])
