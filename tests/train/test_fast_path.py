"""`gradwatch train` takes the fast path for most steps, and their rows are bit-identical to those of the full path."""

import fast_path_steps
import pytest

from gradwatch import catalogue
from gradwatch.config.load import load_config
from gradwatch.monitor.readings.optimizer_tracker import OptimizerTracker
from gradwatch.train import loop

CONFIG = """
run: {{name: shortest, seed: 3, out: {out}, deterministic: true}}
model: {{name: cnn, channels: [4, 8], dropout: 0.2}}
data: {{name: digits, batch_size: 24, eval_batch_size: 360}}
train: {{steps: 45, eval_every: 15, checkpoint: {{every: 14}}}}
watch: {{updates_every: 10, activations_every: 10, histograms_every: 0}}
"""
CHANGES = {
    "adamw": ["optim={name: adamw, lr: 2.0e-3}", "schedule={name: OneCycleLR, max_lr: 4.0e-3}"],
    "clipped": ["optim={name: sgd, lr: 0.05}", "train.clip.norm=0.5", "train.accumulate=2"],
    "clipped by value": ["optim={name: sgd, lr: 0.05}", "train.clip.value=0.01"],
    "line search": ["optim={name: LBFGS, lr: 0.1, max_iter: 3}"],
    "overflow": ["optim={name: sgd, lr: 1.0e+18}", "train.on_nonfinite=skip"],
    "rewinds": ["optim={name: sgd, lr: 30.0}", "train.on_critical=rewind"],
}


@pytest.fixture
def plain(monkeypatch):
    """Return the steps that are recorded on the fast path, as they come."""
    return fast_path_steps.steps_of(monkeypatch)


def trained(folder, changes):
    folder.mkdir()
    path = folder / "shortest.yaml"
    path.write_text(CONFIG.format(out=folder / "runs"))
    return loop.train(load_config(path, changes), log_format="plain").history


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_a_row_is_the_same_on_the_fast_path_and_on_the_full_path(changes, plain, monkeypatch, tmp_path):
    short = trained(tmp_path / "short", changes)
    seen = len(plain)
    monkeypatch.setattr(OptimizerTracker, "fast_path", lambda *_, **__: None)
    long = trained(tmp_path / "long", changes)

    assert len(plain) == seen, "the long way was to be taken"
    fast_path_steps.assert_alike(short, long, but=catalogue.CLOCK_NAMES)
    assert [f.to_json() for f in short.findings] == [f.to_json() for f in long.findings]


@pytest.mark.filterwarnings("ignore:train.accumulate")
@pytest.mark.parametrize("name", ["adamw", "clipped", "clipped by value", "line search"])
def test_steps_at_which_nothing_is_sampled_take_the_fast_path(name, plain, tmp_path):
    history = trained(tmp_path / "run", CHANGES[name])

    assert len(set(plain)) > 0.6 * len(history.run)
