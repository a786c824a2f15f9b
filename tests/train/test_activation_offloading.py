"""Activations kept in host memory give the same gradients, and no weight is moved."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradwatch.train import activation_checkpointing
from gradwatch.train.activation_offloading import except_weights, in_host_memory


@pytest.fixture
def model():
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))
    return nn.Sequential(blocks, nn.Linear(8, 3))


def gradients(model, saving):
    inputs = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)
    with saving:
        loss = functional.mse_loss(model(inputs), torch.ones(4, 3))
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def test_gradients_are_the_very_same_with_activations_in_host_memory(model):
    other = copy.deepcopy(model)

    expected = gradients(model, torch.enable_grad())
    found = gradients(other, in_host_memory(other, torch.device("cpu")))

    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize(("every", "moved"), [(None, 5 + 4 + 2), (2, 1 + 4 + 1 + 2)])
def test_what_the_graph_keeps_is_moved_but_no_weight(model, every, moved):
    # the inputs of 5 linear layers, the outputs of 4 ReLUs, output and target of the loss; or with recomputation, the
    # input of the first segment, what the second segment keeps, the input of the last layer, output and target
    if every:
        activation_checkpointing.every_blocks(model, every)
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return (tensor.clone(),)

    gradients(model, except_weights(model, pack, lambda kept: kept[0]))

    assert len(packed) == moved
    assert set(packed) == {(4, 8), (4, 3)}  # a weight has the shape (8, 8) or (3, 8), or that of its transpose
