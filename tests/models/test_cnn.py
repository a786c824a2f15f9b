"""The convolutional network: its blocks, the shapes that it takes, and that it learns the digits."""

import pytest
import torch
from torch import nn

from gradwatch.data import digits
from gradwatch.errors import GradwatchError
from gradwatch.models import cnn
from gradwatch.records import DataSpec
from gradwatch.train.batches import Batches

DIGITS = DataSpec(input_shape=(1, 8, 8), outputs=10, kind="classes")


def test_each_block_halves_the_image_as_long_as_it_can():
    model = cnn.build(DIGITS, channels=(4, 5, 6, 7)).eval()

    assert [model.blocks[:n](torch.zeros(1, 1, 8, 8)).shape[1:] for n in range(1, 5)] == [
        (4, 4, 4),
        (5, 2, 2),
        (6, 1, 1),
        (7, 1, 1),
    ]
    assert model.head.in_features == 7


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (2, 5, 9), (4, 1, 1)])
@pytest.mark.parametrize("pooling", ["none", "max", "avg"])
def test_images_of_any_size_are_taken(shape, pooling):
    spec = DataSpec(input_shape=shape, outputs=7, kind="classes")

    model = cnn.build(spec, channels=(4, 4), kernel=5, pooling=pooling)

    assert model.eval()(torch.zeros(2, *shape)).shape == (2, 7)


def test_parameters_are_named_by_block_and_head():
    model = cnn.build(DIGITS, channels=[4, 8], normalization="none")

    names = [name for name, _ in model.named_parameters()]
    expected = ["blocks.0.conv", "blocks.1.conv", "head"]
    assert names == [f"{layer}.{part}" for layer in expected for part in ("weight", "bias")]


def test_a_normalised_convolution_has_no_bias_of_its_own():
    model = cnn.build(DIGITS, channels=(4,), normalization="batch")

    assert model.blocks[0].conv.bias is None, "BatchNorm would take it off again"
    assert isinstance(model.blocks[0].norm, nn.BatchNorm2d)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (DataSpec(input_shape=(64,), outputs=2, kind="classes"), r"a sample has shape \(64,\); use mlp"),
        (DataSpec(input_shape=(8,), outputs=50, kind="tokens"), "use gpt"),
    ],
)
def test_data_that_are_no_images_are_refused_with_the_way_out(spec, message):
    with pytest.raises(GradwatchError, match=message):
        cnn.build(spec)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": 4}, "got .* and 4, expected one or more numbers and an odd one"),
        ({"channels": ()}, "expected one or more numbers"),
        ({"channels": (8, 0)}, r"model\.channels\[1\]: got 0, expected at least 1"),
    ],
)
def test_impossible_sizes_are_refused_by_name(options, message):
    with pytest.raises(GradwatchError, match=message):
        cnn.build(DIGITS, **options)


def test_it_learns_the_digits_and_no_channel_dies():
    torch.manual_seed(0)
    splits = digits.build()
    model = cnn.build(splits.spec, channels=(16, 32), pooling="avg")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = Batches(splits.train, batch_size=64, seed=0, shuffle=True)

    for epoch in range(4):
        for inputs, targets in batches.epoch(epoch):
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    model.eval()
    inputs, targets = next(Batches(splits.val, batch_size=len(splits.val)).epoch(0))
    accuracy = (model(inputs).argmax(1) == targets).float().mean().item()
    assert accuracy > 0.95, f"the quickstart reaches 0.99 in 15 epochs, got {accuracy}"
    fires = nn.Sequential(model.blocks[0].conv, model.blocks[0].norm, model.blocks[0].act)(inputs).amax((0, 2, 3)) > 0
    assert fires.all(), f"channels that never fire: {(~fires).nonzero().flatten().tolist()}"
