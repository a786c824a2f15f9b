"""Layers of sequences that run along the batch are found; those that run along time are not."""

# B = samples, T = steps, F = features, C = classes

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from gradwatch.probe.graph.graph import Graph
from gradwatch.probe.graph.sequence_axis import ROW_LOSSES, match_sequence_axis

B, T, FEATURES, C = 12, 7, 8, 3
X = torch.randn(B, T, FEATURES)
LABELS = torch.arange(B) % C


def told(loss):
    graph = Graph(loss)
    matches = [match_sequence_axis(graph, node) for node in graph.of(*ROW_LOSSES)]
    return [(match.observation.values["rows"], match.observation.values["samples"]) for match in matches if match]


def classes(states):
    """Return a cross entropy of the classes of some states of shape (samples, units)."""
    return F.cross_entropy(nn.Linear(states.shape[-1], C)(states), torch.arange(len(states)) % C)


def attend(*, batch_first, dropout=0.0):
    layer = nn.TransformerEncoderLayer(FEATURES, 2, 16, dropout=dropout, batch_first=batch_first)
    return classes(layer(X).mean(1))


def views():
    """Return a loss of the mean of two views of T samples of T steps."""
    layer = nn.TransformerEncoderLayer(FEATURES, 2, 16, batch_first=True)
    return classes(layer(torch.randn(2 * T, T, FEATURES)).mean(1).view(2, T, FEATURES).mean(0))


def unrolled(x):
    """Return the states of a recurrence by hand, of shape (steps, samples, units)."""
    cell, state, states = nn.GRUCell(FEATURES, 5), None, []
    for x_t in x:
        state = cell(x_t, state)
        states.append(state)
    return torch.stack(states)


ALONG_THE_BATCH = {
    "lstm": lambda: classes(nn.LSTM(FEATURES, 5)(X)[0][:, -1]),
    "gru of two layers": lambda: classes(nn.GRU(FEATURES, 5, 2)(X)[0][:, -1]),
    "rnn, both ways": lambda: classes(nn.RNN(FEATURES, 5, bidirectional=True)(X)[0].mean(1)),
    "regression": lambda: F.mse_loss(nn.Linear(5, 1)(nn.LSTM(FEATURES, 5)(X)[0][:, -1]), torch.randn(B, 1)),
    "transformer": lambda: attend(batch_first=False),
    "transformer with dropout": lambda: attend(batch_first=False, dropout=0.1),
    "a loop by hand": lambda: classes(unrolled(X)[:, -1]),
}

ALONG_TIME = {
    "lstm": lambda: classes(nn.LSTM(FEATURES, 5, batch_first=True)(X)[0][:, -1]),
    "time first": lambda: classes(nn.LSTM(FEATURES, 5)(X.transpose(0, 1))[0][-1]),
    "time first, a class for each step": lambda: classes(nn.LSTM(FEATURES, 5)(X.transpose(0, 1))[0].flatten(0, 1)),
    "time first, a value for each step": lambda: F.mse_loss(nn.LSTM(FEATURES, 1)(X)[0], torch.randn(B, T, 1)),
    "one sequence at a time": lambda: classes(nn.LSTM(FEATURES, 5)(X[:, :1])[0][:, 0]),
    "as many steps as samples": lambda: classes(nn.LSTM(FEATURES, 5)(X[:T])[0][:, -1]),
    "gru": lambda: classes(nn.GRU(FEATURES, 5, batch_first=True)(X)[0][:, -1]),
    "transformer": lambda: attend(batch_first=True),
    "transformer with dropout": lambda: attend(batch_first=True, dropout=0.1),
    "two views of each sample, as many as steps": views,
    "a loop over samples": lambda: classes(torch.stack([nn.Linear(FEATURES, 5)(x) for x in X]).mean(1)),
    "attention between nodes": lambda: classes((X[:, 0] @ X[:, 0].T).softmax(-1) @ nn.Linear(FEATURES, 5)(X[:, 0])),
    "no sequence": lambda: classes(nn.Linear(FEATURES, 5)(X[:, 0])),
}


@pytest.mark.parametrize("name", ALONG_THE_BATCH)
def test_a_layer_that_runs_along_the_batch_is_reported(name):
    assert told(ALONG_THE_BATCH[name]()) == [(B, T)]


@pytest.mark.parametrize("name", ALONG_TIME)
def test_a_layer_that_runs_along_time_is_not(name):
    assert told(ALONG_TIME[name]()) == []


EACH = {
    "a value for each step": lambda x, layer: F.mse_loss(nn.Linear(5, 1)(layer(x)[0]), torch.randn(B, T, 1)),
    "a class for each step": lambda x, layer: classes(layer(x)[0].flatten(0, 1)),
}


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_of_predictions_for_each_step_the_size_of_a_batch_tells(name, kind):
    along_batch, along_time = kind(FEATURES, 5), kind(FEATURES, 5, batch_first=True)
    assert told(EACH[name](X, along_batch)) == []

    loader = DataLoader(TensorDataset(X), batch_size=B)
    assert told(EACH[name](X, along_batch)) == [(B, T)]
    assert told(EACH[name](X, along_time)) == []
    assert told(classes(along_batch(X.transpose(0, 1))[0].flatten(0, 1))) == []

    # the samples of the one may be as many as the steps of the other
    other = DataLoader(TensorDataset(X), batch_size=T)
    assert told(EACH[name](X, along_batch)) == []
    del other

    # one that stacks its samples may yield steps first
    loader.collate_fn = torch.stack
    assert told(EACH[name](X, along_batch)) == []
