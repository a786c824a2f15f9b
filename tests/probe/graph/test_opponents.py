"""Parameters of another learner between the model and its loss are told, and those of anybody else are not."""

import torch
from torch import nn

from gradwatch.probe.graph.graph import Graph
from gradwatch.probe.graph.opponents import facts

X = torch.randn(16, 8)


def told(loss, model, *held):
    """Return whether an opponent is told of, where optimizers hold some more parameters than the model's."""
    index = {param: i for i, param in enumerate(model.parameters())}
    return bool(list(facts(Graph(loss), index, {id(p) for p in (*index, *held)})))


def test_the_critic_of_a_generator_is_told_of():
    generator, critic = nn.Linear(8, 8), nn.Linear(8, 1)
    assert told(-critic(generator(X)).mean(), generator)


def test_a_critic_whose_weights_need_no_gradient_is_none():
    generator, judge = nn.Linear(8, 8), nn.Linear(8, 1).requires_grad_(False)
    assert not told(judge(generator(X)).mean(), generator)


def test_what_the_same_optimizer_moves_is_no_opponent():
    model, scale = nn.Linear(8, 1), nn.Parameter(torch.ones(()))
    assert not told((model(X) * scale).mean(), model, scale)


def test_what_comes_before_the_model_is_none():
    encoder, head = nn.Linear(8, 8), nn.Linear(8, 1)
    assert not told(head(encoder(X)).mean(), head)
