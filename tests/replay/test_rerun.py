"""A step that is run again is the same to the last bit, or is told apart with what differs and by how much."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import warm_python
from poisoned import STEP, poisoned

from gradwatch.cli import main
from gradwatch.config.load import load_config
from gradwatch.errors import GradwatchError
from gradwatch.history.compare import compare_rows
from gradwatch.history.disk.writer import read
from gradwatch.incident import recorder
from gradwatch.records import Severity
from gradwatch.replay.incident import incidents
from gradwatch.replay.rerun import rerun
from gradwatch.train.loop import train

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.filterwarnings("ignore:train.accumulate"),
    pytest.mark.filterwarnings("ignore:gradwatch"),
]


@pytest.fixture(autouse=True)
def _snapshots_do_not_rest(monkeypatch):
    monkeypatch.setattr(recorder, "REST_S", 0.0)


def trained(folder, *overrides, **kwargs):
    return train(poisoned(folder, *overrides, **kwargs), log_format="plain").directory


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return a run with an incident, for tests that only read it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "REST_S", 0.0)
        return trained(tmp_path_factory.mktemp("recorded"))


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([], id="fp32"),
        pytest.param(["data.workers=2", "train.precision=bf16"], id="bf16 and workers"),
        pytest.param(["data.workers=2", "train.precision=fp16"], id="fp16 and workers"),
        pytest.param(["train.accumulate=2", "data.batch_size=8"], id="accumulation"),
        pytest.param(["train.activation_checkpointing=sqrt"], id="activation checkpointing"),
        pytest.param(["train.on_nonfinite=continue"], id="weights lost"),
        pytest.param(["run.deterministic=true"], id="deterministic"),
        pytest.param(["data.shuffle=true"], id="shuffled"),
        pytest.param(["optim.name=sgd", "optim.momentum=0.9", "schedule.name=null", "schedule.max_lr=null"], id="sgd"),
    ],
)
def test_the_step_of_an_incident_is_the_same_to_the_last_bit(tmp_path, overrides):
    if "optim.name=sgd" in overrides:
        overrides = ["optim={name: sgd, lr: 0.01, momentum: 0.9}", "schedule=null"]
    directory = trained(tmp_path, *overrides)
    (first, *_) = incidents(directory)

    done = rerun(directory)

    assert done.is_same, done.differences[:5]
    assert (done.source, done.step) == ("incident", first.step)
    assert "data.shuffle=true" in overrides or first.step == STEP
    assert done.start_step == first.step - first.step % 8, "it was run again from the newest snapshot"
    assert done.compared > 50 * (done.step - done.start_step), "every layer is compared at every step"
    assert [weights.is_same for weights in done.weights] == [True]
    assert not np.isfinite(done.steps[0].loss)


CLINIC = sorted(p.stem for p in (ROOT / "configs" / "clinic").glob("*.yaml") if not p.stem.endswith(".cured"))
CRITICAL = {"dead-relu", "fp16-underflow", "non-finite", "vanishing-gradient"}
"""What destroys a training: the other two go on, and are found as warnings, which write no incident."""
MOVING = [
    "model.dropout=0.2",
    "data.augment=[{RandomRotation: {degrees: 9}}]",
    "data.workers=2",
    "train.clip={norm: 100.0}",
    "train.activation_checkpointing=sqrt",
]


def trained_in_the_clinic(name, folder, *overrides):
    always = [f"run.out={folder}", "sinks={tensorboard: {enabled: false}}", "watch.record.every=20"]
    config = load_config(ROOT / "configs" / "clinic" / f"{name}.yaml", [*always, *overrides])
    return train(config, log_format="plain").directory


def asked_again(directory):
    """Return what came of running again the steps of the first two incidents, or that of the first finding."""
    steps = [incident.step for incident in incidents(directory)] or [f.step for f in read(directory).findings]
    assert steps, "it is ill"
    return [rerun(directory, step=step) for step in steps[:2]]


@pytest.mark.parametrize("name", CLINIC)
def test_what_is_found_in_the_clinic_is_the_same_to_the_last_bit(name, clinic_run, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    directory, _ = clinic_run(name, tmp_path)

    assert bool(incidents(directory)) == (name in CRITICAL)
    for done in asked_again(directory):
        assert done.is_same, done.differences[:5]
        assert done.compared > 50
        assert done.weights or name not in CRITICAL


@pytest.mark.parametrize(
    ("name", "steps", "precision"),
    [
        ("vanishing-gradient", 12, "fp16"),
        ("dead-relu", 68, "bf16"),
        ("non-finite", 250, "fp32"),
    ],
)
def test_so_it_is_in_every_format_with_dropout_augmentation_and_workers(name, steps, precision, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)

    directory = trained_in_the_clinic(name, tmp_path, f"train.precision={precision}", f"train.steps={steps}", *MOVING)

    assert incidents(directory)
    for done in asked_again(directory):
        assert done.is_same, done.differences[:5]


def test_healthy_steps_are_the_same_from_a_checkpoint_on(recorded):
    done = rerun(recorded, step=33, until=36)

    assert done.is_same
    assert (done.source, done.start_step) == ("checkpoint", 30)
    assert [shown.step for shown in done.steps] == [33, 34, 35, 36]
    assert [weights.step for weights in done.weights] == [40], "the next checkpoint is not far"
    assert all(shown.is_same and shown.compared > 50 for shown in done.steps)


def test_steps_before_all_that_was_kept_are_the_same_from_the_start_on(recorded):
    done = rerun(recorded, step=3)

    assert done.is_same
    assert (done.source, done.start_step) == ("start", 0)
    assert done.steps[0].compared > 50


def test_asking_leaves_the_run_and_the_random_numbers_of_this_process_as_they_were(recorded):
    before = {path: path.read_bytes() for path in recorded.rglob("*") if path.is_file()}
    state = torch.get_rng_state()

    rerun(recorded)

    assert {path: path.read_bytes() for path in recorded.rglob("*") if path.is_file()} == before
    assert torch.equal(torch.get_rng_state(), state)


def test_data_that_have_changed_are_reported(recorded, tmp_path):
    with np.load(recorded.parents[1] / "data.npz") as file:
        arrays = dict(file)
    arrays["x"][STEP * 16 - 1] += 1e-3
    np.savez(tmp_path / "data.npz", **arrays)
    moved = tmp_path / "run"
    shutil.copytree(recorded, moved)
    config = moved / "config.yaml"
    config.write_text(config.read_text().replace(str(recorded.parents[1]), str(tmp_path)))

    done = rerun(moved)

    assert not done.is_same
    assert done.is_data_changed
    first = done.differences[0]
    assert first.step == STEP - 1
    by_name = {d.statistic: d for d in done.differences if d.step == STEP - 1}
    assert 0 < by_name["loss"].relative < 0.1, "how much differs is told"


def test_a_changed_config_differs_from_the_first_step_on(recorded, tmp_path):
    moved = tmp_path / "run"
    shutil.copytree(recorded, moved)
    config = moved / "config.yaml"
    config.write_text(config.read_text().replace("dropout: 0.2", "dropout: 0.3"))

    done = rerun(moved)

    assert done.differences[0].step == done.start_step
    assert not any(weights.is_same for weights in done.weights)
    assert not done.is_data_changed


def test_it_works_on_what_a_kill_left_behind(tmp_path):
    poisoned(tmp_path)
    arguments = ["train", str(tmp_path / "poisoned.yaml"), "--set", "train.steps=100000"]
    process = subprocess.Popen(
        [*warm_python.command(), "-m", "gradwatch", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while not list((tmp_path / "runs").glob("*/incidents/step-000021/incident.json")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(warm_python.KILL)
    process.communicate(timeout=60)
    (directory,) = (tmp_path / "runs").iterdir()

    done = rerun(directory)

    assert done.is_same
    assert done.step == STEP


@pytest.mark.parametrize(
    ("step", "until", "text"),
    [
        (400, None, "got step 400, expected 0 to 39"),
        (33, 32, "--until: got 32, expected 33 or more"),
    ],
)
def test_a_step_that_was_not_recorded_is_a_mistake(recorded, step, until, text):
    with pytest.raises(GradwatchError, match=text):
        rerun(recorded, step=step, until=until)


def test_a_run_without_an_incident_asks_for_a_step(tmp_path):
    directory = trained(tmp_path, step=None)

    with pytest.raises(GradwatchError, match=r"no critical problem was found.*--step 39"):
        rerun(directory)


def test_a_run_whose_incidents_were_not_saved_does_not_deny_its_problem(tmp_path):
    directory = trained(tmp_path, "watch.record.enabled=false")
    (step,) = {f.step for f in read(directory).findings if f.severity == Severity.CRITICAL}

    with pytest.raises(GradwatchError, match=rf"no incident of its critical problem was saved.*--step {step}$"):
        rerun(directory)
    assert rerun(directory, step=step).is_same


def test_comparing_skips_clocks_and_missing_numbers_and_finds_a_single_bit():
    def table(value, clock):
        values = np.array([[[1.0, np.nan]], [[value, 2.0]]], np.float32)
        clocks = np.array([[[clock, clock]]] * 2, np.float32)
        return {
            "param": {
                "statistics": ["grad.l2", "step_ms"],
                "layers": ["a", "b"],
                "steps": np.array([4, 5]),
                "values": np.concatenate([values, clocks], axis=1),
            }
        }

    nudged = float(np.nextafter(np.float32(3), np.float32(4)))

    same, counts = compare_rows(table(3.0, 1.0), table(3.0, 2.0))
    found, _ = compare_rows(table(3.0, 1.0), table(nudged, 1.0))

    assert same == []
    assert counts == {4: 1, 5: 2}
    assert [(d.step, d.statistic, d.layer, d.recorded, d.again) for d in found] == [(5, "grad.l2", "a", 3.0, nudged)]


def test_the_command_says_that_it_is_the_same(recorded, capsys):
    code = main(["replay", str(recorded)])

    said = capsys.readouterr().out
    assert code == 0
    assert f"step {STEP}" in said
    assert "bit-identical" in said
    assert "step-" not in said


def test_the_command_says_what_differs(recorded, tmp_path, capsys):
    moved = tmp_path / "run"
    shutil.copytree(recorded, moved)
    config = moved / "config.yaml"
    config.write_text(config.read_text().replace("dropout: 0.2", "dropout: 0.3"))

    code = main(["replay", str(moved), "--format", "json"])
    data = json.loads(capsys.readouterr().out)
    main(["replay", str(moved)])
    said = capsys.readouterr().out

    assert code == 1
    assert data["is_same"] is False
    assert data["steps"][0]["loss"] == "inf"
    assert data["differences"][0]["again"] != data["differences"][0]["recorded"]
    assert "differs from the recording" in said
    assert "loss was" in said


def test_a_step_that_is_not_there_exits_with_2(recorded, capsys):
    assert main(["replay", str(recorded), "--step", "1000"]) == 2
    assert "expected 0 to 39" in capsys.readouterr().err


def test_what_remembers_samples_is_compared_as_far_as_the_same_were_taken():
    def table(*steps, silent):
        values = np.array([[[silent]]] * len(steps), np.float32)
        return {"act": {"statistics": ["act.silent"], "layers": ["a"], "steps": np.array(steps), "values": values}}

    found, counts = compare_rows(table(0, 10, 30, silent=5.0), table(0, 10, 20, 30, silent=4.0))

    assert [d.step for d in found] == [0, 10]
    assert counts == {0: 1, 10: 1, 30: 0}
