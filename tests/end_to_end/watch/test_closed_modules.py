"""A module that takes no hooks is watched by its gradients, and one warning names it."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.monitor.readings.autocast_reader import AutocastReader
from gradwatch.probe.activations.probe import ActivationProbe


def layers():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))


class Refusing(nn.Sequential):
    """Takes no hooks."""

    def register_forward_hook(self, *args, **kwargs):
        raise TypeError("no hooks")

    register_forward_pre_hook = register_forward_hook


def traced():
    return torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.ones(2, 8))


MODELS = {
    "a scripted model": (lambda: torch.jit.script(layers()), "the model"),
    "a scripted part": (lambda: nn.Sequential(nn.ReLU(), torch.jit.script(layers())), "`1`"),
    "a scripted activation": (
        lambda: nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.ReLU()), nn.Linear(8, 1)),
        "`1`",
    ),
    "two parts": (lambda: nn.Sequential(torch.jit.script(nn.Linear(8, 8)), torch.jit.script(layers())), "`0`, `1`"),
    "a traced model": (traced, "the model"),
    "a traced part": (lambda: nn.Sequential(traced(), nn.Linear(8, 1)), "`0`"),
    "a class that refuses hooks": (lambda: nn.Sequential(nn.Linear(8, 8), Refusing(nn.ReLU(), nn.Linear(8, 1))), "`1`"),
    "a model that refuses hooks": (lambda: Refusing(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), "the model"),
}


def train(make, *, is_watched, **options):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        model = make()
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.01), []
    monitor = gradwatch.watch(model, optimizer, on_finding=None, **options) if is_watched else None
    for _ in range(12):
        x = torch.randn(16, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append([param.grad.norm().item() for param in model.parameters()])
        optimizer.step()
        if monitor:
            monitor.step(loss, batch=x)
    if monitor:
        monitor.close()
    return monitor, norms


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_watched_and_one_warning_names_the_module(name, tmp_path):
    make, place = MODELS[name]
    with pytest.warns(RuntimeWarning, match="gradwatch") as told:
        monitor, norms = train(make, is_watched=True, run=tmp_path / "run", record=True)

    assert [str(warning.message).partition(" (")[0] for warning in told if warning.category is RuntimeWarning] == [
        f"gradwatch: hooks cannot be attached to {place}"
    ]
    assert told[0].filename == __file__
    assert norms == train(make, is_watched=False)[1]
    np.testing.assert_allclose(monitor.history["grad.l2"], norms, rtol=1e-5)
    assert {layer.module_type for layer in monitor.history.info.layers} == {"Linear"}


@pytest.mark.parametrize(
    ("owner", "method", "feature"),
    [(AutocastReader, "attach", "a hook of the model"), (ActivationProbe, "find_functions", "functional activations")],
)
def test_an_error_while_attaching_costs_one_feature(owner, method, feature, monkeypatch):
    def fail(*_):
        raise KeyError("odd module")

    monkeypatch.setattr(owner, method, fail)
    with pytest.warns(RuntimeWarning, match=f"{feature}.*KeyError"):
        monitor, norms = train(layers, is_watched=True)

    assert norms == train(layers, is_watched=False)[1]
    np.testing.assert_allclose(monitor.history["grad.l2"], norms, rtol=1e-5)
