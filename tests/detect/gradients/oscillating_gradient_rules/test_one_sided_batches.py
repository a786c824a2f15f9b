"""Samples in the order of their classes are found while the loss is finite and every gradient looks plain."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import gradwatch


@pytest.mark.parametrize("batch_size", [16, 64])
@pytest.mark.parametrize("is_sorted", [True, False])
def test_digits_in_the_order_of_their_classes_are_found(batch_size, is_sorted):
    torch.manual_seed(0)
    images, classes = (torch.tensor(part) for part in load_digits(return_X_y=True))
    order = classes.argsort() if is_sorted else torch.randperm(len(classes))
    batches = order[: len(order) // batch_size * batch_size].view(-1, batch_size)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for step in range(120):
            rows = batches[step % len(batches)]
            loss = nn.functional.cross_entropy(model(images[rows].float() / 16), classes[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    # the swings of adaptive optimizers are too small for the other rules of this kind
    assert [f.kind for f in monitor.findings()] == (["oscillating-gradient"] if is_sorted else [])
