"""Regressions of chosen outputs and comparisons of outputs are read from the graph of a loss; others are not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradwatch.probe.graph.graph import Graph
from gradwatch.probe.graph.output_uses import find_chosen_outputs, find_output_pairs
from gradwatch.records import LayerInfo

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


def places(loss):
    params = dict(MODEL.named_parameters())
    layers = [
        LayerInfo(
            name=name,
            module=name.rpartition(".")[0],
            module_type="Linear",
            shape=tuple(param.shape),
            dtype="float32",
            trainable=True,
            group=0,
        )
        for name, param in params.items()
    ]
    index = {param: i for i, param in enumerate(params.values())}
    return [found.layer for found in find_output_pairs(Graph(loss), index, layers)]


def test_losses_of_pairs_of_outputs_are_found():
    out = MODEL(X)
    unit = F.normalize(out)
    losses = {
        "distances": torch.cdist(out, out).mean(),
        "triplets": F.triplet_margin_loss(MODEL(X), MODEL(X + 1), MODEL(X - 1)),
        "similarities": F.cross_entropy(unit @ unit.T, torch.arange(6)),
        "unit length": F.mse_loss(unit, torch.randn(6, 3)),
        "scaled to bounds": ((out - out.min()) / (out.max() - out.min())).sum(),
    }
    assert {name: places(loss) for name, loss in losses.items()} == {name: ["2.bias"] for name in losses}


def test_losses_of_single_outputs_are_not():
    out = MODEL(X)
    losses = {
        "classes": F.cross_entropy(out, ACTIONS.squeeze(1)),
        "regression": F.mse_loss(out, torch.randn(6, 3)),
        "labels": F.binary_cross_entropy_with_logits(out, torch.rand(6, 3).round()),
        "squares by hand": (out - torch.randn(6, 3)).square().mean(),
        "squares as products": (out * out).mean(),
        "two terms": out.square().mean() + out.abs().mean(),
        "a residual before the last layer": (MODEL[2](MODEL[1](MODEL[0](X)) + MODEL[0](X))).sum(),
    }
    assert {name: places(loss) for name, loss in losses.items()} == {name: [] for name in losses}
