"""`gradwatch train` with a budget of memory for the activations."""

import json

import numpy as np

from gradwatch import load_run
from gradwatch.config.load import load_config

DEEP = """\
model: {{name: mlp, depth: 6, width: 16, activation: gelu}}
data: {{name: digits, batch_size: 512}}
optim: {{name: adamw, lr: 1e-3}}
train: {{steps: 4, device: cpu}}
run: {{out: {out}}}
"""


def test_a_budget_is_settled_once_and_gives_the_numbers_of_a_training_without_it(gradwatch, tmp_path):
    config = tmp_path / "deep.yaml"
    config.write_text(DEEP.format(out=tmp_path))
    peak = json.loads(gradwatch("plan", config, "--format", "json").out)["peak_bytes"]
    budget = f"train.activation_checkpointing={{budget: {int(0.85 * peak)}B}}"

    gradwatch("train", config, "--set", "run.name=plain")
    begun = gradwatch("train", config, "--set", "run.name=frugal", "--set", budget, "--set", "train.steps=2")
    assert begun.code == 0, begun.err
    plain, frugal = (next(tmp_path.glob(f"{name}-*")) for name in ("plain", "frugal"))
    resumed = gradwatch("train", "--resume", frugal, "--set", "train.steps=4")
    replayed = gradwatch("replay", frugal, "--step", "3")

    assert "(optimal): " in begun.err
    section = load_config(frugal / "config.yaml").train.activation_checkpointing
    assert section.modules
    assert section.budget is None
    assert resumed.code == 0
    assert "recompute" not in resumed.err  # the config of the run holds the choice
    losses = [load_run(run)["loss"] for run in (plain, frugal)]
    assert np.array_equal(*losses)
    assert "bit-identical" in replayed.out
