"""The output's bias is found where its gradient tells the classes of a batch, and nowhere else."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradwatch.probe.graph.cross_entropy import find_chance_loss
from gradwatch.probe.graph.graph import Graph
from gradwatch.probe.graph.reader import LossGraphReader
from gradwatch.probe.parameters import list_parameters

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 5


def classes(model, loss):
    """Return the layers and values of the events that tell of classes."""
    return [
        (e.layer, e.values)
        for e in LossGraphReader(model, *list_parameters(model)).read(loss, step=0)
        if e.kind == "graph-classes"
    ]


def network(*, bias=True):
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5, bias=bias))


def test_the_bias_before_a_cross_entropy_is_reported_with_samples_and_classes():
    model = network()

    assert classes(model, F.cross_entropy(model(X), Y)) == [("2.bias", {"samples": 16.0, "classes": 5.0, "nat": 1.0})]


def test_positions_of_a_sequence_count_as_samples():
    model = network()

    ((_, found),) = classes(model, 3 * F.cross_entropy(model(X.view(4, 4, 8)).flatten(0, 1), Y))

    assert found["samples"] == 16
    assert "nat" not in found, "three times a cross entropy is none"


def test_a_sum_over_samples_has_a_nat_for_each():
    model = network()

    ((_, found),) = classes(model, F.cross_entropy(model(X), Y, reduction="sum"))

    assert found["nat"] == 16


@pytest.mark.parametrize(
    "loss", [lambda z: z.square().mean(), lambda z: F.cross_entropy(z, Y) + F.cross_entropy(-z, Y)]
)
def test_other_losses_and_sums_of_several_tell_nothing(loss):
    model = network()

    assert classes(model, loss(model(X))) == []


def test_scores_without_a_bias_tell_nothing():
    model = network(bias=False)

    assert classes(model, F.cross_entropy(model(X), Y)) == []


UNITS = {
    "of samples": (lambda z: F.cross_entropy(z, Y), 1.0, 5.0),
    "summed": (lambda z: F.cross_entropy(z, Y, reduction="sum"), 16.0, 5.0),
    "of places": (lambda z: F.cross_entropy(z.view(4, 4, 5).transpose(1, 2), Y.view(4, 4)), 1.0, 5.0),
    "of pixels, summed": (
        lambda z: F.cross_entropy(z.view(2, 2, 4, 5).permute(0, 3, 1, 2), Y.view(2, 2, 4), reduction="sum"),
        16.0,
        5.0,
    ),
    "of yes and no": (lambda z: F.binary_cross_entropy_with_logits(z, torch.ones(16, 5)), 1.0, 2.0),
    "of yes and no, summed": (
        lambda z: F.binary_cross_entropy_with_logits(z, torch.ones(16, 5), reduction="sum"),
        80.0,
        2.0,
    ),
}


@pytest.mark.parametrize("name", UNITS)
def test_the_loss_of_knowing_nothing_is_reported_in_its_unit(name):
    loss, nat, number = UNITS[name]
    scores = torch.zeros(16, 5, requires_grad=True)

    ((kind, _, _, values),) = find_chance_loss(Graph(loss(scores)))

    assert (kind, values) == ("graph-chance", {"nat": nat, "classes": number})
    assert loss(scores).item() == pytest.approx(nat * math.log(number))


def test_a_cross_entropy_beside_another_loss_has_no_unit():
    scores = torch.zeros(16, 5, requires_grad=True)
    assert list(find_chance_loss(Graph(F.cross_entropy(scores, Y) + scores.square().mean()))) == []
