"""What `gradwatch.watch` writes into a run directory, and how that ends."""

import contextlib
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import warm_python
from end_to_end.watch.loops import (
    batches,
    loss_of,
    make,
)
from torch import nn

import gradwatch
from gradwatch.errors import GradwatchError
from gradwatch.history.disk import claim, writer


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


def watched_run(folder, name="run"):
    """Watch and train nothing, and return the run directory."""
    model = make()
    with gradwatch.watch(model, torch.optim.SGD(model.parameters()), run=folder / name) as monitor:
        return monitor.run_dir


def test_a_run_of_the_same_name_gets_the_next_free_one_and_says_so(tmp_path, capsys):
    made = [watched_run(tmp_path) for _ in range(3)]

    assert made == [tmp_path / "run", tmp_path / "run-2", tmp_path / "run-3"]
    assert [gradwatch.load_run(path).info.name for path in made] == ["run", "run-2", "run-3"]
    assert [line for line in capsys.readouterr().err.splitlines() if "already" in line] == [
        f"gradwatch: {tmp_path / 'run'} already holds a run; this one is written to {path}" for path in made[1:]
    ]


def test_a_directory_without_a_run_is_used_as_it_is(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")

    assert watched_run(tmp_path) == tmp_path / "run"
    assert "already" not in capsys.readouterr().err


def test_two_that_ask_for_one_name_at_once_get_one_each(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: claim.claim_free(tmp_path / "run"), range(8)))

    assert len(set(made)) == 8


def test_a_directory_that_cannot_be_made_is_refused_before_training(tmp_path):
    (tmp_path / "file").touch()
    model = make()
    optimizer = torch.optim.SGD(model.parameters())

    with pytest.raises(GradwatchError, match="cannot be written"):
        gradwatch.watch(model, optimizer, run=tmp_path / "file" / "run")

    assert not optimizer._optimizer_step_pre_hooks


def test_a_history_in_memory_has_no_directory():
    model = make()
    with gradwatch.watch(model, torch.optim.SGD(model.parameters())) as monitor:
        assert monitor.run_dir is None


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

    ended = subprocess.run([*warm_python.command(), "-c", code], capture_output=True, text=True, check=False)

    end, details = ended.stderr.splitlines()
    assert ended.returncode == 0
    assert end.startswith("gradwatch: no problems found in 3 steps")
    assert details == f"gradwatch: details: gradwatch diagnose {tmp_path / 'run'}"
    assert writer.status(tmp_path / "run") == "finished"
    assert len(gradwatch.load_run(tmp_path / "run")["loss"]) == 3
