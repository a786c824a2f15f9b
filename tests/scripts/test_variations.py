"""A variation writes a training in another way, and the training still learns."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.variations import VARIATIONS, Told, VariedMonitor

CHANGED = {"accumulation", "bfloat16", "gradient scaler", "warm-up of ten steps"}
"""Variations that change the losses of a small classifier by more than rounding."""


class Counter:
    """A monitor that keeps what it is told."""

    def __init__(self):
        self.told = []

    def step(self, loss, **context):
        self.told.append((type(loss), sorted(context)))


def train(variation=None, *, steps=60):
    """Return the losses of a training, and what its monitor is told."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    told, counter = Told(), Counter()
    if variation:
        VARIATIONS[variation](model, optimizer, told)
    monitor = VariedMonitor(counter, told)
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 6)
        loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)
        losses.append(loss.item())
    return losses, counter.told


@pytest.mark.parametrize("variation", VARIATIONS)
def test_a_varied_training_learns(variation, monkeypatch):
    monkeypatch.setattr(Tensor, "backward", Tensor.backward)  # so that the true ones come back
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", nn.utils.clip_grad_norm_)
    monkeypatch.setattr("scripts.fault_zoo.variations._SCALED", [])
    plain, _ = train()

    losses, told = train(variation)

    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    assert (losses == pytest.approx(plain, rel=1e-3)) == (variation not in CHANGED)
    assert len(told) == 60 / (2 if variation == "accumulation" else 1)
    assert {kind for kind, _ in told} == {float if variation == "loss as a number" else Tensor}
    assert all(("batch" in context) == (variation not in ("loss as a number", "no batch")) for _, context in told)
