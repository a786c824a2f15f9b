"""A run that is interrupted anywhere goes on to the very same numbers."""

import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import warm_python
from interruption import After

from gradwatch import catalogue, load_run
from gradwatch.config.load import load_config
from gradwatch.train import checkpoint, loop

CONFIG = """
run: {{name: resume, seed: 3, out: {out}}}
model: {{name: cnn, channels: [4, 8], dropout: 0.2}}
data:
  name: digits
  batch_size: 24
  eval_batch_size: 360
  workers: {workers}
  augment: [{{RandomRotation: {{degrees: 9}}}}]
optim: {{name: adamw, lr: 2.0e-3}}
schedule: {{name: OneCycleLR, max_lr: 4.0e-3}}
train:
  steps: 40
  accumulate: 2
  precision: {precision}
  eval_every: 10
  clip: {{norm: 1.0}}
  checkpoint: {{every: 5, keep: 3}}
watch: {{updates_every: 3, activations_every: 4, histograms_every: 20}}
"""
pytestmark = pytest.mark.filterwarnings("ignore:train.accumulate")  # equal runs are compared, BatchNorm or not


def write_config(folder, *, workers=0, precision="fp32"):
    path = folder / "resume.yaml"
    path.write_text(CONFIG.format(out=folder / "runs", workers=workers, precision=precision))
    return path


def train(config, monkeypatch, *, steps=None, resume=None):
    with monkeypatch.context() as patch:
        if steps:
            patch.setattr(loop, "Interrupt", lambda: After(steps))
        return loop.train(config, resume=resume, log_format="plain")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a function that gives the uninterrupted run of a precision."""
    made = {}

    def run(precision="fp32"):
        if precision not in made:
            config = load_config(write_config(tmp_path_factory.mktemp(precision), precision=precision))
            made[precision] = loop.train(config, log_format="plain").directory
        return made[precision]

    return run


def assert_same_run(found: Path, expected: Path):
    a, b = load_run(found), load_run(expected)
    for table in ("param", "act", "run"):
        for name in getattr(a, table).statistics:
            if name not in catalogue.CLOCK_NAMES:
                np.testing.assert_array_equal(a.steps(name), b.steps(name), err_msg=name)
                np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    assert a.findings == b.findings
    assert a.events == b.events
    (step_a, state_a), (step_b, state_b) = (checkpoint.load(run / "checkpoints") for run in (found, expected))
    assert step_a == step_b == 40
    assert state_a["progress"] | {"elapsed_s": 0} == state_b["progress"] | {"elapsed_s": 0}
    for name, value in state_b["model"].items():
        assert torch.equal(state_a["model"][name], value), name


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("steps", [1, 17])
def test_an_interrupted_run_resumes_to_the_same_numbers(tmp_path, monkeypatch, whole, precision, steps):
    config = load_config(write_config(tmp_path, precision=precision))

    first = train(config, monkeypatch, steps=steps)
    second = train(config, monkeypatch, resume=first.directory)

    assert (first.ending, first.history.step) == ("interrupted", steps - 1)
    assert second.ending == "finished"
    assert_same_run(first.directory, whole(precision))


def test_a_run_interrupted_twice_resumes_to_the_same_numbers(tmp_path, monkeypatch, whole):
    config = load_config(write_config(tmp_path))

    directory = train(config, monkeypatch, steps=9).directory
    train(config, monkeypatch, steps=13, resume=directory)
    train(config, monkeypatch, resume=directory)

    assert_same_run(directory, whole())


UNKNOWABLE = """
run: {{name: unknowable, seed: 3, out: {out}}}
model: {{name: mlp, depth: 2, width: 16}}
data: {{name: npz, file: {file}, batch_size: 64}}
optim: {{name: adamw, lr: 1.0e-3}}
train: {{steps: 40, checkpoint: {{every: 5, keep: 3}}}}
watch: {{activations_every: 2}}
"""


@pytest.mark.parametrize("steps", [8, 15, 24])
def test_what_takes_several_looks_to_see_is_reported_at_the_same_step_of_a_resumed_run(tmp_path, monkeypatch, steps):
    generator = np.random.default_rng(0)
    inputs, labels = generator.normal(size=(2000, 8)).astype(np.float32), generator.integers(0, 4, 2000)
    np.savez(tmp_path / "unknowable.npz", x=inputs, y=labels)
    path = tmp_path / "unknowable.yaml"
    path.write_text(UNKNOWABLE.format(out=tmp_path / "runs", file=tmp_path / "unknowable.npz"))
    config = load_config(path)

    whole = train(config, monkeypatch)
    first = train(config, monkeypatch, steps=steps)
    second = train(config, monkeypatch, resume=first.directory)

    told = [event for event in whole.history.events if event.kind == "outputs-unpaired"]
    assert [event.step for event in told] == [14]
    assert second.history.events == whole.history.events


def start(*arguments):
    return subprocess.Popen(
        [*warm_python.command(), "-m", "gradwatch", "train", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "NO_COLOR": "1"},
    )


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run did not get that far"
        time.sleep(0.002)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_with_workers_ended_by_a_signal_resumes_to_the_same_numbers(tmp_path, whole, number):
    process = start(write_config(tmp_path, workers=2), "--set", "run.name=ended")

    wait_for(lambda: list((tmp_path / "runs").glob("*/checkpoints/step-*05")), process)
    process.send_signal(warm_python.KILL if number == signal.SIGKILL else number)
    process.communicate(timeout=60)
    (directory,) = (tmp_path / "runs").iterdir()
    resumed = start("--resume", directory)
    output, errors = resumed.communicate(timeout=120)

    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 3)
    assert resumed.returncode == 0, output + errors
    assert_same_run(directory, whole())
