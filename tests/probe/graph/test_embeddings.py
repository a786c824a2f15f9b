"""Codebooks: a table whose rows are compared is told, others are not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradwatch.probe.graph.reader import LossGraphReader
from gradwatch.probe.parameters import list_parameters

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Quantiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)
        self.codes = nn.Embedding(6, 4)

    def forward(self, lookup):
        z = self.encoder(X)
        q = lookup(self.codes, torch.cdist(z, self.codes.weight).argmin(1))
        return z, q, self.decoder(z + (q - z).detach())


def told(model, loss):
    """Return the names of the tables that a loss tells."""
    return [
        e.layer
        for e in LossGraphReader(model, *list_parameters(model)).read(loss, step=0)
        if e.kind == "graph-codebook"
    ]


@pytest.mark.parametrize("lookup", [lambda codes, ids: codes(ids), lambda codes, ids: codes.weight[ids]])
@pytest.mark.parametrize("error", [F.mse_loss, lambda a, b: (a - b).pow(2).mean()])
def test_codes_that_are_drawn_to_what_they_stand_for_are_reported(lookup, error):
    model = Quantiser()
    z, q, rebuilt = model(lookup)
    loss = F.mse_loss(rebuilt, X) + error(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
    assert told(model, loss) == ["codes.weight"]


def test_words_that_go_on_into_layers_are_no_codes():
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 1))
    assert told(model, F.mse_loss(model(torch.arange(6)), torch.ones(6, 1))) == []


def test_entities_that_are_compared_with_each_other_are_no_codes():
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 1))
    one, other = (model[0](torch.tensor(ids)) for ids in ([0, 1], [2, 3]))
    assert told(model, F.relu(1 - (one - other).pow(2).sum(1)).mean()) == []


def test_values_of_actions_in_a_table_are_no_codes():
    model = nn.Embedding(6, 4)
    values = model(torch.arange(6)).gather(1, torch.zeros(6, 1, dtype=torch.long))
    assert told(model, F.mse_loss(values, torch.ones(6, 1))) == []
