"""The numbers are those of the loss: unscaled, unclipped, one row per optimizer step, however the step is made."""

import numpy as np
import pytest
import torch
from torch import nn

from gradwatch.config.sections.train import ClipSection
from gradwatch.history.store import History
from gradwatch.monitor import Monitor, Schedule
from gradwatch.monitor.wiring import inspect
from gradwatch.pipeline.pipeline import Pipeline
from gradwatch.probe.activations.probe import ActivationProbe
from gradwatch.train import activation_checkpointing
from gradwatch.train.objective import Objective
from gradwatch.train.step import Stepper

RTOL, ATOL = 2e-5, 1e-7
"""Stated tolerance: the order of float32 sums differs; counts and fractions are exact."""
STEPS, SAMPLES = 6, 24


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Linear(12, 12), act) for act in (nn.ReLU(), nn.GELU(), nn.Tanh(), nn.ReLU())]
        )
        self.head = nn.Linear(12, 3)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.head(self.blocks(x))


def record(*, scaler=None, accumulate=1, clip=None, change=None, compile_backend=None):
    """Train a few steps and return what was recorded."""
    torch.manual_seed(0)
    model = Net()
    if change:
        change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    activations = ActivationProbe(model)
    params, info = inspect(
        {"": model},
        [optimizer],
        activations=activations,
        name="test",
        precision="fp32",
        loss_scaling=scaler is not None,
        accumulate=accumulate,
        total_steps=STEPS,
    )
    monitor = Monitor(
        params,
        optimizers=[optimizer],
        pipeline=Pipeline(History(info)),
        activations=activations,
        scaler=scaler,
        schedule=Schedule(updates=1, activations=1, histograms=0),
    )
    stepper = Stepper(
        model=model,
        objective=Objective(function=nn.CrossEntropyLoss()),
        optimizer=optimizer,
        scaler=scaler,
        observe=monitor.observe,
        device=torch.device("cpu"),
        precision="fp32",
        clip=clip,
        on_nonfinite="skip",
    )
    if compile_backend:
        model.compile(backend=compile_backend)
    generator = torch.Generator().manual_seed(1)
    with monitor:
        for _ in range(STEPS):
            x = torch.randn(SAMPLES, 12, generator=generator)
            y = torch.randint(3, (SAMPLES,), generator=generator)
            size = SAMPLES // accumulate
            result = stepper.run(list(zip(x.split(size), y.split(size), strict=True)))
            monitor.step(result.loss, batch=x, statistics={"grad_norm.after_clip": result.clipped_norm})
    return monitor.history


WAYS = {
    "GradScaler": lambda: {"scaler": torch.amp.GradScaler("cpu", init_scale=65536.0)},
    "accumulation": lambda: {"accumulate": 4},
    "checkpointing every block": lambda: {"change": lambda m: activation_checkpointing.every_blocks(m, 1)},
    "checkpointing in segments": lambda: {"change": activation_checkpointing.sqrt_blocks},
    "checkpointing by name": lambda: {"change": lambda m: activation_checkpointing.matching_modules(m, ["blocks.*"])},
    "compiled": lambda: {"compile_backend": "aot_eager"},
    "all at once": lambda: {
        "scaler": torch.amp.GradScaler("cpu", init_scale=1024.0),
        "accumulate": 4,
        "change": lambda m: activation_checkpointing.every_blocks(m, 2),
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_the_same_training_has_the_same_statistics(way):
    expected = record()

    found = record(**WAYS[way]())

    for name in (*expected.param.statistics, *expected.act.statistics, "loss", "grad_norm.before_clip"):
        assert len(expected[name]) == STEPS, name
        np.testing.assert_allclose(found[name], expected[name], rtol=RTOL, atol=ATOL, err_msg=name)
    for name in ("grad.zero_frac", "grad.nonfinite", "act.dead_frac"):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def test_clipping_changes_no_statistic_of_the_gradient():
    expected = record()["grad_norm.before_clip"][0]

    history = record(clip=ClipSection(norm=expected / 10))

    assert history["grad_norm.before_clip"][0] == expected
    assert history["grad_norm.after_clip"][0] == pytest.approx(expected / 10)
    total = np.sqrt(np.nansum(history["grad.l2"][0].astype(np.float64) ** 2))
    assert total == pytest.approx(expected, rel=1e-6)


def test_a_parameter_without_gradient_is_nan_and_keeps_its_place():
    history = record()

    column = history.param.layers.index("unused")

    assert np.isnan(history["grad.l2"][:, column]).all()
    assert np.isnan(history["grad.zero_frac"][:, column]).all()
    assert np.isfinite(np.delete(history["grad.l2"], column, axis=1)).all()


def test_the_statistics_are_those_of_autograd():
    torch.manual_seed(0)
    model = Net()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 12, generator=generator)
    y = torch.randint(3, (SAMPLES,), generator=generator)
    nn.functional.cross_entropy(model(x), y).backward()
    expected = [float("nan") if p.grad is None else p.grad.norm().item() for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]

    history = record()

    assert list(history.param.layers) == names
    np.testing.assert_allclose(history["grad.l2"][0], expected, rtol=1e-5)
