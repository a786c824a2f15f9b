"""From a loop that becomes NaN to the line of code: what each command prints leads to the next one."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from page_blocks import printing, run_command

import gradwatch
from gradwatch.config.load import load_config
from gradwatch.train.loop import train

LOOP = """
import torch

import gradwatch

torch.manual_seed(0)
model = torch.nn.Linear(4, 2, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def step(left, right):
    return (model(left) - model(right)).square().sum(1).sqrt().mean()  # bad


if __name__ == "__main__":
    with gradwatch.watch(model, optimizer, run="runs/mine"{options}) as monitor:
        for number in range(20):
            left, right = torch.randn(2, 8, 4)
            if number == 12:
                right[5] = left[5]
            loss = step(left, right)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=(left, right))
"""
LINE = next(number for number, line in enumerate(LOOP.splitlines(), 1) if "# bad" in line)
NAN = """
run: {{name: nan, out: {out}}}
model: {{name: mlp, depth: 1, width: 8}}
data: {{name: npz, file: {file}, kind: values, batch_size: 8, shuffle: false, val_inputs: x, val_targets: y}}
optim: {{name: sgd, lr: 1.0e-2}}
train: {{steps: 8}}
sinks: {{tensorboard: {{enabled: false}}}}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return an empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def printed_by(line, *, code=0):
    return run_command(f"{line}  # exits with {code}")


def test_three_commands_lead_from_the_loop_to_the_line(folder):
    Path("loop.py").write_text(LOOP.format(options=", record=True"))

    loop = printed_by("python loop.py")
    diagnose = loop.splitlines()[-1].removeprefix("gradwatch: details: ")
    diagnosis = printed_by(diagnose, code=1)
    (locate,) = set(re.findall(r"python -c '.*?'", diagnosis))
    located = printed_by(locate)

    assert diagnose == "gradwatch diagnose runs/mine"
    assert "step 12: critical non-finite (GW001)" in loop
    assert f"line loop.py:{LINE}, in step" in located
    assert "samples 5 of the batch" in located


def test_a_script_in_another_folder_is_named_with_its_folder(folder):
    Path("train").mkdir()
    Path("train/loop.py").write_text(LOOP.format(options=", record=True"))

    printed_by("python train/loop.py")
    (diagnosis,) = gradwatch.load_run("runs/mine").diagnoses

    assert diagnosis.confirm_code.startswith("PYTHONPATH=train python -c 'import gradwatch, loop; ")


def test_a_loop_that_saves_nothing_is_told_to(folder):
    Path("loop.py").write_text(LOOP.format(options=""))
    printed_by("python loop.py")
    (diagnosis,) = gradwatch.load_run("runs/mine").diagnoses

    names = {"gradwatch": gradwatch}
    exec(compile(LOOP.format(options=""), "loop.py", "exec"), names | {"__name__": "loop"}, names)
    exec(diagnosis.confirm_code, names)
    names["monitor"].close()

    assert "This run did not save the step" in diagnosis.confirm
    assert names["monitor"].run_dir == Path("runs/mine-2")
    assert gradwatch.incidents("runs/mine-2") == ()


def test_a_training_from_a_config_is_replayed_by_its_path(folder):
    targets = np.ones((64, 1), np.float32)
    targets[3 * 8 + 5] = 3e38  # its square is beyond float32
    np.savez(folder / "data.npz", x=np.ones((64, 4), np.float32), y=targets)
    Path("nan.yaml").write_text(NAN.format(out="runs", file="data.npz"))
    with printing():
        train(load_config(Path("nan.yaml")), log_format="plain")
    (run,) = Path("runs").iterdir()
    diagnosis, *_ = gradwatch.load_run(run).diagnoses

    assert diagnosis.confirm_code == f"gradwatch replay {run} --step 3"
    assert "samples 5 of the batch" in printed_by(diagnosis.confirm_code)
