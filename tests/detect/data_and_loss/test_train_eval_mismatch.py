"""Validation inputs of another scale are found once validation is worse than training, and not before."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import gradwatch


@pytest.mark.parametrize("scale", [1.0, 16.0])
def test_validation_inputs_that_are_not_scaled_are_found(scale):
    torch.manual_seed(0)
    images, classes = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for step in range(200):
            rows = torch.randint(1400, (32,))
            loss = nn.functional.cross_entropy(model(images[rows]), classes[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            val_loss = None
            if step % 20 == 19:
                model.eval()
                with torch.no_grad():
                    val_loss = float(nn.functional.cross_entropy(model(scale * images[1400:]), classes[1400:]))
                model.train()
            monitor.step(loss, val_loss=val_loss)
    findings = monitor.findings()
    assert [f.kind for f in findings][:1] == (["train-eval-mismatch"] if scale > 1 else [])
    assert all(f.kind in ("train-eval-mismatch", "overfitting") for f in findings)
