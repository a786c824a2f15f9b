"""The samples of a large gradient are ranked by leaving them out, and data are told from state."""

import json
import sys

import pytest

from gradwatch.cli import main
from gradwatch.config.load import load_config
from gradwatch.errors import GradwatchError
from gradwatch.replay.samples.ranking import _cause, rank_samples
from gradwatch.train.loop import train

DATA = """
import torch
from torch.utils.data import TensorDataset

def splits():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(160, 8, generator=generator)
    targets = inputs[:, :1].clone()
    inputs[[70, 75]] *= 30  # in the batch of step 4
    return TensorDataset(inputs, targets), TensorDataset(inputs[:8], targets[:8])
"""
CONFIG = """
model: {name: mlp, depth: 2, width: 8}
data: {target: "odd_samples:splits", batch_size: 16, shuffle: false}
optim: {name: SGD, lr: 0.01}
loss: {name: mse}
train: {steps: 6, checkpoint: {every: 3}}
"""


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Return a function that trains with settings, and returns the run directory."""
    (tmp_path / "odd_samples.py").write_text(DATA)
    (tmp_path / "odd.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "odd_samples", raising=False)

    def run(*settings):
        return train(load_config(tmp_path / "odd.yaml", [*settings]), log_format="json").directory

    return run


@pytest.mark.parametrize("settings", [[], ["train.accumulate=2", "data.batch_size=8"]])
def test_the_samples_without_which_a_spike_is_gone_are_blamed(trained, settings):
    found = rank_samples(trained(*settings), 4)

    assert found.cause == "data"
    assert set(found.blamed) == {70, 75}
    assert {s.index for s in found.samples[:2]} == {70, 75}
    assert sum(s.share for s in found.samples) == pytest.approx(1.0, abs=1e-3)
    assert found.norm > 100 * found.norm_without
    assert found.norm_without == pytest.approx(found.usual, rel=0.5)
    assert (found.earlier_step, len(found.samples)) == (0, 16)


def test_weights_that_went_astray_are_the_state(trained):
    found = rank_samples(trained("optim.lr=0.3"), 5)  # the update of step 4 threw the weights off

    assert (found.cause, found.blamed) == ("state", ())
    assert found.other_data > 1e3 * found.other_state


def test_a_batch_norm_does_not_hinder_the_ranking(trained):
    found = rank_samples(trained("model.normalization=batch"), 4)

    assert found.samples[0].index == 75
    assert sum(s.share for s in found.samples) == pytest.approx(1.0, abs=0.5)


@pytest.mark.parametrize(
    ("other_data", "other_state", "cause"),
    [(1.0, 100.0, "data"), (100.0, 1.0, "state"), (1.0, 1.0, "both"), (100.0, 100.0, "either")],
)
def test_the_cause_is_what_takes_half_of_the_excess_away(other_data, other_state, cause):
    assert _cause(100.0, other_data, other_state, 1.0) == cause
    assert _cause(1.5, other_data, other_state, 1.0) == "none"


def test_the_command_prints_the_ranking_after_the_replay(trained, capsys):
    run = trained()
    capsys.readouterr()

    assert main(["replay", str(run), "--step", "4", "--samples"]) == 0
    text = capsys.readouterr().out
    assert "bit-identical" in text
    assert "cause   data: with the same weights, other batches have a usual gradient" in text
    assert "without samples 75, 70" in text

    assert main(["replay", str(run), "--step", "4", "--samples", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"]["blamed"] == [75, 70]


def test_a_gradient_that_is_not_finite_is_a_matter_of_locate(trained):
    run = trained("optim.lr=1e30", "train.on_nonfinite=continue")

    with pytest.raises(GradwatchError, match=r"is not finite; gradwatch replay .* --step 5 --locate names"):
        rank_samples(run, 5)
