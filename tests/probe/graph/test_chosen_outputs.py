"""A regression of the values of actions is read from the graph of its loss; other regressions are not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradwatch.probe.graph.chosen_outputs import find_chosen_outputs
from gradwatch.probe.graph.graph import Graph

MODEL = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
X, ACTIONS, GOAL = torch.randn(6, 4), torch.arange(6)[:, None] % 3, torch.randn(6)


def is_found(loss):
    return bool([*find_chosen_outputs(Graph(loss))])


@pytest.mark.parametrize("criterion", [F.mse_loss, F.smooth_l1_loss, F.huber_loss])
def test_a_regression_of_chosen_outputs_is_found(criterion):
    assert is_found(criterion(MODEL(X).gather(1, ACTIONS).squeeze(1), GOAL))


def test_other_losses_are_no_news():
    all_of_them = F.mse_loss(MODEL(X), torch.randn(6, 3))
    hidden = F.mse_loss(MODEL[2](MODEL[:2](X).gather(0, torch.zeros(6, 8, dtype=torch.long))).sum(1), GOAL)
    likelihood = -torch.log_softmax(MODEL(X), 1).gather(1, ACTIONS).mean()

    assert not any(map(is_found, (all_of_them, hidden, likelihood)))
