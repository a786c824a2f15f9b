"""The softmax of a loss goes over the outputs of the layer that made the scores, or else somebody is told."""

# B = samples, T = places, C = classes

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradwatch.probe.graph.graph import Graph
from gradwatch.probe.graph.softmax_axis import LOSSES, match_axis_mixup

B, T, C = 6, 20, 16
WORDS = torch.randn(B, T, 8)
TURNED = torch.randn(T, B, 8).transpose(0, 1)
SIGNAL = torch.randn(B, 8, T)
IMAGES = torch.randn(B, 3, 10, 10)


def told(scores, *, classes):
    """Return what is told of a cross entropy of some scores, of which axis 1 is that of the classes."""
    target = torch.zeros(scores.shape[0], *scores.shape[2:], dtype=torch.long) % classes
    graph = Graph(F.cross_entropy(scores, target))
    matches = [match_axis_mixup(graph, node) for node in graph.of(*LOSSES)]
    return [match.observation.text for match in matches if match]


MIXED = {
    "a view for a transpose": lambda: nn.Linear(8, C)(WORDS).view(B, C, T),
    "of an input that is not contiguous": lambda: nn.Linear(8, C)(TURNED).view(B, C, T),
    "without a bias": lambda: nn.Linear(8, C, bias=False)(WORDS).view(B, C, T),
    "twice as many places as classes": lambda: nn.Linear(8, C)(torch.randn(B, 32, 8)).view(B, C, 32),
    "twice as many classes as places": lambda: nn.Linear(8, 2 * T)(WORDS).view(B, 2 * T, T),
    "a convolution, flattened": lambda: nn.Conv1d(8, 5, 3)(SIGNAL).reshape(-1, 5),
    "the wrong axes of a convolution swapped": lambda: nn.Conv1d(8, 5, 3)(SIGNAL).transpose(0, 1).reshape(-1, 5),
    "pictures, flattened": lambda: nn.Conv2d(3, 5, 1)(IMAGES).view(-1, 5),
    "as many places as classes, and not swapped": lambda: nn.Linear(8, T)(WORDS),
}

WHOLE = {
    "a transpose": lambda: nn.Linear(8, C)(WORDS).transpose(1, 2),
    "of an input that is not contiguous": lambda: nn.Linear(8, C)(TURNED).transpose(1, 2),
    "a permutation": lambda: nn.Linear(8, C)(WORDS).permute(0, 2, 1),
    "flattened": lambda: nn.Linear(8, C)(WORDS).view(-1, C),
    "without the last place": lambda: nn.Linear(8, C)(WORDS)[:, :-1].reshape(-1, C),
    "places first": lambda: nn.Linear(8, C)(WORDS.transpose(0, 1)).permute(1, 2, 0),
    "with a temperature": lambda: (nn.Linear(8, C)(WORDS) / 2).transpose(1, 2),
    "a convolution": lambda: nn.Conv1d(8, 5, 3)(SIGNAL),
    "a convolution, turned and flattened": lambda: nn.Conv1d(8, 5, 3)(SIGNAL).transpose(1, 2).reshape(-1, 5),
    "pictures": lambda: nn.Conv2d(3, 5, 1)(IMAGES),
    "a pointer to a place": lambda: nn.Linear(8, 1)(WORDS).squeeze(2),
    "a pointer into a picture": lambda: nn.Conv2d(3, 1, 1)(IMAGES).flatten(1),
    "pairs of a batch against each other": lambda: nn.Linear(8, 5)(WORDS[:, 0]) @ nn.Linear(8, 5)(WORDS[:, 1]).T,
    "the same pairs, the other way": lambda: (nn.Linear(8, 5)(WORDS[:, 0]) @ nn.Linear(8, 5)(WORDS[:, 1]).T).T,
    "several answers side by side": lambda: nn.Linear(8, 5 * C)(WORDS[:, 0]).view(B, 5, C).transpose(1, 2),
    "several answers, classes first": lambda: nn.Linear(8, 5 * C)(WORDS[:, 0]).view(B, C, 5),
}


@pytest.mark.parametrize("name", MIXED)
def test_classes_that_are_mixed_with_places_are_reported(name):
    scores = MIXED[name]()
    (text,) = told(scores, classes=scores.shape[1])
    assert f"{scores.shape[1]} values that are not the" in text


@pytest.mark.parametrize("name", WHOLE)
def test_scores_that_only_change_their_shape_are_not(name):
    scores = WHOLE[name]()
    assert told(scores, classes=scores.shape[1]) == []
