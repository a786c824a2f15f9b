"""What `gradwatch.watch` writes into a run directory, and how that ends."""

import contextlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from end_to_end.watch.loops import (
    batches,
    loss_of,
    make,
)
from torch import nn

import gradwatch
from gradwatch.errors import GradwatchError
from gradwatch.history.disk import writer


@pytest.mark.parametrize(
    ("make_model", "autocast", "expected"),
    [
        (make, None, "fp32"),
        (make, torch.bfloat16, "bf16"),
        (make, torch.float16, "fp16"),
        (lambda: make().bfloat16(), None, "bf16"),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_the_format_of_the_forward_pass_is_seen(make_model, autocast, expected, inside, tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = make_model()

        def forward(self, x):
            with context() if inside else contextlib.nullcontext():
                return self.body(x.to(self.body[0].weight.dtype))

    def context():
        return torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext()

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradwatch.watch(model, optimizer, run=tmp_path / "run") as monitor:
        model.eval()
        model(torch.ones(2, 6))  # a trial without autocast tells nothing
        model.train()
        with context():
            loss = model(torch.ones(2, 6)).float().sum()
        loss.backward()
        optimizer.step()
        monitor.step(loss)
        assert writer.read(tmp_path / "run").info.precision == expected, "also where the process dies before the end"

    assert monitor.history.info.precision == expected


def test_a_run_directory_holds_what_the_monitor_said(tmp_path):
    model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(6, 6), nn.Sigmoid())], nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = next(batches(samples=16))
    with gradwatch.watch(model, optimizer, run=tmp_path / "run") as monitor:
        for _ in range(40):
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss, batch=x)

    stored = gradwatch.load_run(tmp_path / "run")

    assert {"vanishing-gradient", "constant-batch"} <= {f.kind for f in monitor.findings()}
    assert tuple(stored.findings) == monitor.findings()
    np.testing.assert_array_equal(stored["grad.l2"], monitor.history["grad.l2"])
    assert writer.status(tmp_path / "run") == "finished"
    assert list((tmp_path / "run").rglob("events.out.tfevents*")), "for TensorBoard"


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, "interrupted"), (ZeroDivisionError, "failed")])
def test_a_run_says_how_it_ended(error, status, tmp_path):
    model = make()
    with pytest.raises(error), gradwatch.watch(model, torch.optim.SGD(model.parameters()), run=tmp_path / "run"):
        raise error

    assert writer.status(tmp_path / "run") == status


def test_a_directory_with_a_run_is_refused_before_training(tmp_path):
    model = make()
    optimizer = torch.optim.SGD(model.parameters())
    gradwatch.watch(model, optimizer, run=tmp_path / "run").close()

    with pytest.raises(GradwatchError, match="already holds a run"):
        gradwatch.watch(model, optimizer, run=tmp_path / "run")

    assert not optimizer._optimizer_step_pre_hooks


NEVER_CLOSED = """
import torch, gradwatch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = gradwatch.watch(model, optimizer, run={run!r})
for _ in range(3):
    loss = model(torch.ones(4, 2)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    monitor.step(loss)
"""


def test_a_monitor_that_is_never_closed_loses_nothing_and_does_no_harm(tmp_path):
    code = NEVER_CLOSED.format(run=str(tmp_path / "run"))

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(gradwatch.load_run(tmp_path / "run")["loss"]) == 3
