"""Each mutation changes how a small classifier trains, except for what changes no loss."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.mutations import MUTATIONS, NotApplicableError

UNCHANGED = {"graphs kept"}


def losses(mutation=None, *, steps=45):
    torch.manual_seed(0)
    hidden = [
        (nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1)),
        *((nn.Linear(16, 16), nn.ReLU()),) * 2,
    ]
    model = nn.Sequential(*(module for block in hidden for module in block), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if mutation:
        MUTATIONS[mutation].plant(model, optimizer, random.Random(0))
    found = []
    for _ in range(steps):
        model.train()
        x = torch.randn(32, 6)
        loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_changes_the_training(mutation, monkeypatch):
    monkeypatch.setattr(F, "cross_entropy", F.cross_entropy)  # so that the true ones come back
    monkeypatch.setattr(Tensor, "backward", Tensor.backward)
    healthy = losses()
    try:
        mutant = losses(mutation)
    except NotApplicableError:
        assert mutation == "eps 1", "SGD has none"
        return
    assert (mutant == healthy) == (mutation in UNCHANGED)
