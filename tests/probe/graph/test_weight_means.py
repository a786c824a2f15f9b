"""Weights drawn about a number other than zero are found, and the inputs of matrices in modules of one's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradwatch
from gradwatch.probe.graph.reader import LossGraphReader
from gradwatch.probe.graph.weight_means import find_offset_weights
from gradwatch.probe.parameters import list_parameters

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Dense(nn.Module):
    """A layer as people write it, with inputs first."""

    def __init__(self, inputs, outputs, draw=torch.randn):
        super().__init__()
        self.w = nn.Parameter(draw(inputs, outputs))
        self.b = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return x @ self.w + self.b


def drawn(model):
    return [(layer, values["mean"]) for _, layer, _, values in find_offset_weights(*list_parameters(model))]


def inputs(model, loss):
    events = LossGraphReader(model, *list_parameters(model)).read(loss, step=0)
    return {event.layer: event.values["inputs"] for event in events if event.kind == "graph-matrix"}


def test_weights_that_are_uniform_from_0_to_1_have_a_mean():
    torch.manual_seed(0)
    ((layer, mean),) = drawn(nn.Sequential(Dense(64, 64, torch.rand), Dense(64, 64)))

    assert layer == "0.w"
    assert mean == pytest.approx(0.5, abs=0.02), "of 4096 numbers"


def test_weights_that_are_drawn_as_torch_draws_them_have_none():
    torch.manual_seed(0)
    assert drawn(nn.Sequential(nn.Linear(8, 8), nn.Conv2d(4, 4, 3), nn.GRU(8, 8), nn.MultiheadAttention(8, 2))) == []


def test_frozen_weights_and_vectors_are_left_out():
    assert drawn(nn.Sequential(Dense(64, 64, torch.rand).requires_grad_(False), nn.LayerNorm(64))) == []


def test_a_matrix_has_as_many_inputs_as_it_sums_over_on_whichever_side_it_stands():
    ahead, behind = Dense(8, 5), Dense(3, 8)
    model = nn.ModuleList([ahead, behind])

    assert inputs(model, ahead(X).mean() + F.linear(X, behind.w).mean()) == {"0.w": 8, "1.w": 8}
    assert inputs(model, (ahead.w.T @ X.T).mean() + ahead(X.view(2, 8, 8)).mean()) == {"0.w": 8}


def test_a_product_of_two_parameters_is_no_layer():
    model = nn.ParameterDict({"queries": nn.Parameter(torch.randn(5, 8)), "w": nn.Parameter(torch.randn(8, 3))})

    assert inputs(model, (model["queries"] @ model["w"]).mean()) == {}


def test_a_network_of_own_layers_drawn_from_0_to_1_is_reported():
    torch.manual_seed(0)
    model = nn.Sequential(
        Dense(16, 32, torch.rand), nn.ReLU(), Dense(32, 32, torch.rand), nn.ReLU(), Dense(32, 3, torch.zeros)
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with gradwatch.watch(model, optimizer) as watcher:
        for _ in range(12):
            loss = F.cross_entropy(model(torch.cat([X, X], 1).abs()), torch.arange(16) % 3)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watcher.step(loss)

    poor = [f for f in watcher.findings() if f.kind == "poor-initialization" and str(f.severity) == "warning"]
    assert [(f.layer, f.step) for f in poor] == [("0", 0), ("2", 0)]
