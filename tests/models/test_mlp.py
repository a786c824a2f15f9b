"""The fully connected network: its layers, what its options do to them, and that depth is survivable."""

import math

import pytest
import torch
from torch import nn

from gradwatch.data import digits
from gradwatch.errors import GradwatchError
from gradwatch.models import mlp
from gradwatch.records import DataSpec
from gradwatch.train.batches import Batches

DIGITS = DataSpec(input_shape=(1, 8, 8), outputs=10, kind="classes")


def linear_layers(model):
    return [m for m in model.modules() if isinstance(m, nn.Linear)]


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_depth_counts_linear_layers_the_output_included(depth):
    model = mlp.build(DIGITS, depth=depth, width=16)

    assert len(linear_layers(model)) == depth, "depth is the number of linear layers"
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10), "an image is flattened and classified"


def test_parameters_are_named_by_block_and_head():
    model = mlp.build(DIGITS, depth=3, width=16)

    names = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    assert names == {"blocks.0.linear", "blocks.1.linear", "head"}, "configs and findings name layers so"


def test_values_get_as_many_outputs_as_the_target_is_wide():
    model = mlp.build(DataSpec(input_shape=(4,), outputs=3, kind="values"), depth=2)

    assert model(torch.zeros(5, 4)).shape == (5, 3)


@pytest.mark.parametrize("name", list(mlp.ACTIVATIONS))
def test_every_activation_is_a_module_that_hooks_can_see(name):
    model = mlp.build(DIGITS, depth=3, activation=name)

    expected = type(mlp.ACTIVATIONS[name]())
    assert all(type(block.act) is expected for block in model.blocks)
    assert torch.isfinite(model(torch.rand(2, 1, 8, 8))).all()


def test_residual_adds_the_input_where_widths_agree():
    block = mlp.Block(4, 4, activation="relu", normalization="none", residual=True, dropout=0.0)
    x = torch.randn(2, 4)

    assert torch.equal(block(x), x + torch.relu(block.linear(x)))
    assert not mlp.Block(3, 4, activation="relu", normalization="none", residual=True, dropout=0.0).residual


@pytest.mark.parametrize(("normalization", "kind"), [("batch", nn.BatchNorm1d), ("layer", nn.LayerNorm)])
def test_normalisation_stands_between_layer_and_activation(normalization, kind):
    model = mlp.build(DIGITS, depth=2, normalization=normalization)

    assert [type(m) for m in model.blocks[0].children()][:3] == [nn.Linear, kind, nn.ReLU]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"init": "kaiming"}, math.sqrt(2 / 256)),
        ({"init": "kaiming", "gain": 3.0}, 3 / math.sqrt(256)),
        ({"init": "xavier", "activation": "sigmoid"}, math.sqrt(2 / 512)),
        ({"init": "orthogonal", "activation": "tanh"}, 5 / 3 / math.sqrt(256)),
        ({"init": "normal", "init_std": 0.2}, 0.2),
    ],
)
def test_init_gives_hidden_weights_the_deviation_of_its_formula(options, expected):
    torch.manual_seed(0)
    model = mlp.build(DIGITS, depth=3, width=256, **options)

    weight = model.blocks[1].linear.weight
    assert weight.std().item() == pytest.approx(expected, rel=0.02), "65,536 draws: within 1 %"
    assert not model.blocks[1].linear.bias.any(), "biases start at zero"


def test_default_init_leaves_layers_as_torch_made_them():
    torch.manual_seed(3)
    expected = nn.Linear(64, 16)
    torch.manual_seed(3)
    model = mlp.build(DIGITS, depth=2, width=16)

    assert torch.equal(model.blocks[0].linear.weight, expected.weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 0}, r"model\.depth: got 0, expected at least 1"),
        ({"width": -2}, r"model\.width: got -2"),
        ({"dropout": 1.0}, r"model\.dropout: got 1\.0, expected a number from 0 to below 1"),
    ],
)
def test_impossible_sizes_are_refused_by_name(options, message):
    with pytest.raises(GradwatchError, match=message):
        mlp.build(DIGITS, **options)


def test_tokens_are_refused_with_the_way_out():
    with pytest.raises(GradwatchError, match="label per position; use gpt"):
        mlp.build(DataSpec(input_shape=(8,), outputs=50, kind="tokens"))


def gradients_of_first_batch(model):
    splits = digits.build()
    inputs, targets = next(Batches(splits.train, batch_size=64, seed=0, shuffle=True).epoch(0))
    nn.functional.cross_entropy(model(inputs), targets).backward()
    # in float64: squares of 1e-24 are zero in float32
    return [layer.weight.grad.double().norm().item() for layer in linear_layers(model)]


def test_thirty_sigmoid_layers_lose_the_gradient_on_its_way_to_the_input():
    torch.manual_seed(0)

    norms = gradients_of_first_batch(mlp.build(DIGITS, depth=30, width=64, activation="sigmoid"))

    assert norms[0] < 1e-15 * norms[-1], f"each layer should take off a factor of about 10: {norms}"


def test_thirty_relu_layers_with_residuals_and_batchnorm_learn_the_digits():
    torch.manual_seed(0)
    splits = digits.build()
    model = mlp.build(splits.spec, depth=30, width=64, activation="relu", residual=True, normalization="batch")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = Batches(splits.train, batch_size=64, seed=0, shuffle=True)

    for epoch in range(4):
        for inputs, targets in batches.epoch(epoch):
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    model.eval()
    inputs, targets = next(Batches(splits.val, batch_size=len(splits.val)).epoch(0))
    accuracy = (model(inputs).argmax(1) == targets).float().mean().item()
    assert accuracy > 0.85, f"it reaches 0.95 within 8 epochs; chance is 0.1, got {accuracy}"
