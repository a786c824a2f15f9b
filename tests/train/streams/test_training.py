"""A training on a stream: exact resume, passes, replay, and settings that a stream cannot have."""

import itertools

import pytest
import torch

from gradwatch import load_run
from gradwatch.config.load import load_config
from gradwatch.errors import ConfigError, GradwatchError
from gradwatch.replay.locate_in_run import locate_in_run
from gradwatch.replay.rerun import rerun
from gradwatch.train import checkpoint
from gradwatch.train.loop import train

CONFIG = """
run: {{name: stream, out: {folder}/runs}}
model: {{name: gpt, layers: 1, width: 16, heads: 2, dropout: 0.1}}
data: {{name: text_stream, files: {folder}, context: 8, batch_size: 4}}
optim: {{name: adamw, lr: 1e-2}}
train: {{steps: 12, checkpoint: {{every: 4}}, accumulate: 2}}
sinks: {{terminal: {{enabled: false}}, tensorboard: {{enabled: false}}, html: {{enabled: false}}}}
"""

OWN = """
import torch
from torch.utils.data import IterableDataset


class Points(IterableDataset):
    num_classes = 3

    def __init__(self, bad=None, size=30):
        self.bad, self.size = bad, size

    def __iter__(self):
        for i in range(self.size):
            yield torch.randn(5) * (float("inf") if i == self.bad else 1), i % 3


def pair(**options):
    return Points(**options), Points()
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Return a function that loads the config with overrides."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_stream.py").write_text(OWN)
    (tmp_path / "a.txt").write_text("".join(f"line {i} of {i * i} letters\n" for i in range(30)))
    path = tmp_path / "stream.yaml"
    path.write_text(CONFIG.format(folder=tmp_path))
    own = ("model={name: mlp, depth: 2, width: 4}", "data={target: own_stream:Points, batch_size: 4}")
    return lambda *overrides, is_own=False: load_config(path, [*own * is_own, *overrides], is_new=True)


def run(config, **options):
    return train(config, log_format="plain", **options)


def saved(outcome):
    return checkpoint.load(outcome.directory / "checkpoints")[1]


def assert_same(a, b):
    """Assert that two trainings ended in the same state to the bit."""
    for name in a["model"]:
        assert torch.equal(a["model"][name], b["model"][name]), name
    for number, moments in a["optimizer"]["state"].items():
        assert all(torch.equal(moments[key], b["optimizer"]["state"][number][key]) for key in moments)
    assert torch.equal(a["random"]["torch"], b["random"]["torch"])
    assert a["data"] == b["data"]
    progress = [dict(state["progress"], elapsed_s=0) for state in (a, b)]
    assert progress[0] == progress[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_training_ends_in_the_same_state_to_the_bit(config, workers):
    whole = run(config(f"data.workers={workers}"))

    part = run(config(f"data.workers={workers}", "train.steps=7"))
    resumed = run(config("train.steps=12"), resume=part.directory)

    assert_same(saved(resumed), saved(whole))
    assert saved(whole)["progress"]["epoch"] == 1, "so passes end in between"
    assert resumed.history["loss"].tolist() == whole.history["loss"].tolist()
    assert load_run(whole.directory).info.data.samples is None


def test_a_stream_of_ones_own_without_a_state_is_resumed_by_reading_again(config):
    whole = run(config(is_own=True))

    part = run(config("train.steps=5", is_own=True))
    with pytest.warns(RuntimeWarning, match="Points has no state_dict and load_state_dict, so the first 8 samples"):
        resumed = run(config(is_own=True), resume=part.directory)

    assert_same(saved(resumed), saved(whole))


def test_a_step_of_a_stream_is_replayed_and_its_bad_sample_is_named_by_its_number(config):
    outcome = run(config("data.bad=13", "watch.record.every=1", "train.accumulate=1", is_own=True))

    again = rerun(outcome.directory)
    found = locate_in_run(outcome.directory, 3).located

    assert again.step == 3
    assert again.is_same
    assert found.in_data == (13,)


def test_settings_that_a_stream_cannot_have_are_reported_all_at_once(config):
    per_epoch = "schedule={name: StepLR, per: epoch, step_size: 1}"
    overrides = ("data.shuffle=true", "train.epochs=2", "train.on_critical=rewind", per_epoch)

    with pytest.raises(ConfigError) as named:
        config(*overrides, "data.val_files=a.txt")
    with pytest.raises(ConfigError) as own:
        run(config(*overrides, "data.target=own_stream:pair", is_own=True))

    expected = {"data.shuffle", "train.epochs", "schedule.per", "train.eval_every", "train.on_critical"}
    assert {".".join(problem.key) for problem in named.value.problems} == expected
    assert {".".join(problem.key) for problem in own.value.problems} == expected


def test_a_stream_that_gives_no_batch_ends_the_training_with_a_reason(config):
    with pytest.raises(GradwatchError, match="pass 0 over the stream of own_stream:Points gave no batch"):
        run(config("data.drop_last=true", "data.size=3", is_own=True))


def test_transforms_apply_to_streams_and_a_validation_stream_is_read_whole(config):
    outcome = run(
        config(
            "data={target: own_stream:pair, transform: [{GaussianNoise: {sigma: 0.1}}]}",
            "model={name: mlp, depth: 2, width: 4}",
            "train.eval_every=6",
            "train.accumulate=1",
        )
    )

    steps_T, losses_T = outcome.history.steps("val_loss"), outcome.history["val_loss"]
    assert list(itertools.compress(steps_T.tolist(), losses_T == losses_T)) == [5, 11]
