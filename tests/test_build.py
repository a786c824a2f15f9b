"""From a config to live objects: what a `loss.target` is given."""

import pytest
import torch

from gradwatch import build
from gradwatch.config.load import load_config
from gradwatch.errors import GradwatchError
from gradwatch.records import DataSpec

OWN = """\
import torch


def huber(outputs, targets, *, delta=1.0):
    return torch.nn.functional.huber_loss(outputs, targets, delta=delta)


class Huber(torch.nn.HuberLoss):
    def __init__(self, delta=1.0):
        super().__init__(delta=delta)
"""
CONFIG = "model: {name: mlp}\ndata: {name: synthetic}\noptim: {name: sgd}\ntrain: {steps: 1}\n"


@pytest.fixture
def make_loss(tmp_path, monkeypatch):
    """Return a function from overrides to the loss that a config with them has."""
    (tmp_path / "own_build_losses.py").write_text(OWN)
    (tmp_path / "own.yaml").write_text(CONFIG)
    monkeypatch.syspath_prepend(tmp_path)
    spec = DataSpec(input_shape=(2,), outputs=1, kind="values")
    return lambda *overrides: build.loss(load_config(tmp_path / "own.yaml", overrides), spec)


@pytest.mark.parametrize("target", ["huber", "Huber"])
def test_a_loss_of_ones_own_takes_its_settings(make_loss, target):
    loss = make_loss(f"loss={{target: 'own_build_losses:{target}', delta: 0.5}}")
    outputs, targets = torch.tensor([3.0, 0.1]), torch.zeros(2)

    expected = (0.5 * (3.0 - 0.25) + 0.1**2 / 2) / 2  # beyond delta it is linear, within it a square

    assert loss(outputs, targets).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "huber",
            "loss.target: 'own_build_losses:huber' is called with the model's outputs and the targets, with the "
            "settings dellta: got an unexpected keyword argument 'dellta'",
        ),
        (
            "Huber",
            "loss.target: 'own_build_losses:Huber' does not accept these settings: got an unexpected keyword argument "
            "'dellta'",
        ),
    ],
)
def test_a_setting_that_a_loss_of_ones_own_does_not_take_is_a_mistake(make_loss, target, message):
    with pytest.raises(GradwatchError) as caught:
        make_loss(f"loss={{target: 'own_build_losses:{target}', dellta: 0.5}}")

    assert str(caught.value) == message
