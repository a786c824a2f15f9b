"""A warm-up that is longer than the run is warned of, diagnosed as that, and its remedy is tested."""

import json

import pytest

from gradwatch.cli import main

CONFIG = """
model: {name: mlp, depth: 2, width: 16}
data: {name: synthetic, samples: 400, batch_size: 50}
optim: {name: adamw, lr: 3e-3}
schedule: {warmup_steps: 100000}
train: {epochs: 10, threads: 1}
sinks: {tensorboard: {enabled: false}}
"""


@pytest.fixture
def run(tmp_path, capsys):
    path = tmp_path / "w.yaml"
    path.write_text(CONFIG)
    code = main(
        ["train", str(path), "--set", f"run.out={tmp_path}/runs", "--log-format", "plain", "--fail-on", "never"]
    )
    assert code == 0
    (directory,) = (tmp_path / "runs").iterdir()
    return directory, capsys.readouterr()


def test_the_warning_the_remedy_and_its_test(run, capsys):
    directory, told = run
    assert "schedule.warmup_steps: 100000 is more than the run's steps (70)" in told.err
    remedy = "step 20 of a warm-up of 100,000 in a run of 70 steps: set schedule.warmup_steps to 3"
    assert remedy in " ".join(told.out.split())

    main(["diagnose", str(directory), "--verify", "--fail-on", "never"])
    text = " ".join(capsys.readouterr().out.split())
    main(["diagnose", str(directory), "--format", "json", "--fail-on", "never"])
    (diagnosis,) = json.loads(capsys.readouterr().out)["diagnoses"]

    assert f"{remedy} tested: cures" in text
    assert f"tested: cures gradwatch train {directory}/config.yaml --set schedule.warmup_steps=3" in text
    assert "almost certain" in text
    assert "% sure" not in text
    assert diagnosis["certainty"] == pytest.approx(12 / 13), "a number in JSON only"
    assert diagnosis["remedies"][0]["patch"] == {"schedule.warmup_steps": 3}
    assert diagnosis["remedies"][0]["cures"] is None, "it was not tested in this call"
