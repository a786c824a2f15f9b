"""What a training does after a critical finding: go on, stop, leave the batch out, or go back; and so does a resume."""

import warnings

import numpy as np
import pytest
import torch
from interruption import After
from poisoned import BATCH, STEP, poisoned

from gradwatch import load_run
from gradwatch.errors import GradwatchError
from gradwatch.incident import recorder
from gradwatch.replay.incident import incidents
from gradwatch.replay.rerun import rerun
from gradwatch.train import checkpoint, loop
from gradwatch.train.data_position import Position, positions
from gradwatch.train.loop import train
from gradwatch.train.recovery import recover
from gradwatch.train.training_state import TrainingState

REWIND = ["train.on_nonfinite=continue", "train.on_critical=rewind"]
pytestmark = pytest.mark.filterwarnings("ignore:gradwatch")


def run(folder, *overrides, **kwargs):
    return train(poisoned(folder, *overrides, **kwargs), log_format="plain")


def weights(outcome):
    return checkpoint.load(outcome.directory / "checkpoints")[1]["model"]


def assert_same_weights(a, b):
    assert all(torch.equal(value, weights(b)[name]) for name, value in weights(a).items())


def kinds(outcome):
    return [event.kind for event in load_run(outcome.directory).events]


@pytest.fixture(scope="module")
def rewound(tmp_path_factory):
    """Return the outcome of a training that went back, for tests that only read it."""
    return run(tmp_path_factory.mktemp("rewound"), *REWIND)


def test_by_default_it_goes_on_as_before(tmp_path):
    outcome = run(tmp_path)

    assert outcome.ending == "finished"
    assert "incident" in kinds(outcome)
    assert not {"rewind", "batch-left-out"} & set(kinds(outcome))
    assert outcome.history.step == 39


def test_stop_ends_the_run_after_the_step_and_says_that_it_failed(tmp_path):
    outcome = run(tmp_path, "train.on_nonfinite=continue", "train.on_critical=stop")

    assert outcome.ending == "critical"
    assert outcome.history.step == STEP
    assert '"failed"' in (outcome.directory / "run.json").read_text()


def test_rewind_trains_through_a_poisoned_batch(rewound):
    history = load_run(rewound.directory)
    (rewind,) = [event for event in history.events if event.kind == "rewind"]
    assert rewound.ending == "finished"
    assert history.steps("loss").tolist() == list(range(40)), "each step is in the history once"
    assert np.isfinite(history["loss"]).all()
    assert all(bool(torch.isfinite(value).all()) for value in weights(rewound).values())
    assert not history.findings
    assert f"step {STEP}" in rewind.text
    assert "went back to step 16" in rewind.text


def test_after_a_rewind_the_weights_are_those_of_a_run_that_never_had_the_batch(rewound, tmp_path, monkeypatch):
    build = TrainingState.build

    def without_the_batch(config, **kwargs):
        training = build(config, **kwargs)
        training.progress.bad = [[0, STEP, 0]]
        return training

    with monkeypatch.context() as patch:
        patch.setattr(TrainingState, "build", without_the_batch)
        other = run(tmp_path, step=None)

    assert_same_weights(rewound, other)


@pytest.mark.parametrize("steps", [18, STEP + 3, STEP + 12])
def test_a_rewound_run_that_is_interrupted_comes_to_the_same_end(rewound, tmp_path, monkeypatch, steps):
    config = poisoned(tmp_path, *REWIND)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "Interrupt", lambda: After(steps))
        first = train(config, log_format="plain")
    second = train(config, resume=first.directory, log_format="plain")

    assert first.ending == "interrupted"
    assert_same_weights(rewound, second)
    ours, theirs = load_run(second.directory), load_run(rewound.directory)
    np.testing.assert_array_equal(ours["loss"], theirs["loss"])
    np.testing.assert_array_equal(ours["grad.l2"], theirs["grad.l2"])
    assert [e.kind for e in ours.events].count("rewind") == 1


def test_a_bad_batch_is_known_again_in_another_epoch_after_a_restart(tmp_path, monkeypatch):
    config = poisoned(tmp_path, *REWIND, "train.steps=70")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "Interrupt", lambda: After(STEP + 8))
        first = train(config, log_format="plain")
    second = train(config, resume=first.directory, log_format="plain")

    progress = checkpoint.load(second.directory / "checkpoints")[1]["progress"]
    assert second.ending == "finished"
    assert np.isfinite(load_run(second.directory)["loss"]).all()
    assert progress["rewinds"] == 1, "it did not train on it in the second and third epoch"
    assert [identity[:2] for identity in progress["bad"]] == [[0, STEP]]


def test_steps_after_a_rewind_can_be_run_again_from_before_it(rewound):
    done = rerun(rewound.directory, step=25)

    assert done.source == "start"
    assert done.is_same, done.differences[:3]


@pytest.mark.parametrize("remedy", ["skip", "lower_lr"])
def test_an_incident_after_a_rewind_can_be_run_again(tmp_path, monkeypatch, remedy):
    monkeypatch.setattr(recorder, "REST_S", 0.0)
    config = poisoned(
        tmp_path, *REWIND, f"train.rewind={{remedy: {remedy}, limit: 1}}", "optim.lr=0.01", "schedule=null"
    )
    with np.load(tmp_path / "data.npz") as file:
        arrays = dict(file)
    arrays["y"][(STEP + 2) * BATCH] = 3e38  # a second sick sample, between the same two snapshots
    np.savez(tmp_path / "data.npz", **arrays)

    directory = train(config, log_format="plain").directory
    found = [incident.step for incident in incidents(directory)]
    again = [rerun(directory, step=step) for step in found]

    expected = {"skip": [STEP, STEP + 1], "lower_lr": [STEP]}  # one batch is left out, or it comes again
    assert found == expected[remedy]
    assert all(done.is_same for done in again), [done.differences[:2] for done in again]


def test_a_rewind_may_lower_the_learning_rate_instead(tmp_path):
    overrides = [
        *REWIND,
        "train.rewind={remedy: lower_lr, lr_factor: 0.25, limit: 2}",
        "optim.lr=0.01",
        "schedule=null",
    ]

    outcome = run(tmp_path, *overrides)

    history = load_run(outcome.directory)
    texts = [event.text for event in history.events if event.kind == "rewind"]
    assert outcome.ending == "critical", "the batch is as bad at any learning rate"
    assert len(texts) == 3
    assert "multiplied by 0.25 (1 of 2 rewinds)" in texts[0]
    assert "after 2 rewinds" in texts[2]
    rates = history["lr.0"]
    assert rates[15] == 0.01
    np.testing.assert_allclose(rates[16:], 0.01 * 0.25**2)


@pytest.mark.parametrize(
    "schedule",
    [
        "schedule={name: OneCycleLR, max_lr: 0.01}",
        "schedule={name: cosine_annealing, warmup_steps: 5}",
        "schedule={name: step_lr, step_size: 3}",
        "schedule={name: cosine_annealing_warm_restarts, T_0: 6}",
        "schedule=null",
    ],
)
def test_lowering_lowers_every_learning_rate_to_come_by_the_same_factor(tmp_path, schedule):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plain = run(tmp_path / "a", schedule, step=None)
    lowered = run(
        tmp_path / "b", *REWIND, schedule, "train.rewind={remedy: lower_lr, lr_factor: 0.5, limit: 1}", "train.steps=40"
    )

    before, after = load_run(plain.directory)["lr.0"], load_run(lowered.directory)["lr.0"]

    np.testing.assert_allclose(after[:16], before[:16])
    np.testing.assert_allclose(after[16:], 0.5 * before[16 : len(after)], rtol=1e-6)


def test_skip_leaves_the_batch_out_when_it_comes_again(tmp_path):
    outcome = run(tmp_path, "train.on_critical=skip", "train.steps=70")

    losses = load_run(outcome.directory)["loss"]
    assert np.flatnonzero(~np.isfinite(losses)).tolist() == [STEP]
    assert kinds(outcome).count("batch-left-out") == 1


def poisoned_often(folder, *overrides):
    """Return the config of a training that has a sick sample in each batch of steps 4 to 15."""
    config = poisoned(folder, "train.on_critical=skip", *overrides, step=None)
    with np.load(folder / "data.npz") as file:
        arrays = dict(file)
    arrays["y"][4 * BATCH : 16 * BATCH : BATCH] = 3e38
    np.savez(folder / "data.npz", **arrays)
    return config


@pytest.mark.parametrize("on_critical", ["rewind", "skip", "stop"])
def test_a_run_that_stops_at_nan_stops_before_anything_critical_is_handled(tmp_path, on_critical):
    config = poisoned(tmp_path, "train.on_nonfinite=stop", f"train.on_critical={on_critical}")

    outcome = train(config, log_format="plain")

    assert outcome.ending == "non-finite"
    assert outcome.history.step == STEP, "no step comes after it, and none is taken back"


def test_of_many_batches_that_are_left_out_only_the_first_are_warned_of(tmp_path):
    config = poisoned_often(tmp_path)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        outcome = train(config, log_format="plain")

    told = [str(w.message) for w in said if "its batch is skipped" in str(w.message)]
    assert len(told) == recover.MAX_WARNINGS
    assert told[-1].endswith("further skipped batches are recorded without a warning")
    assert kinds(outcome).count("batch-left-out") == 12


@pytest.mark.parametrize("rest_s", [0.0, 1e9])
def test_of_many_batches_each_is_left_out_in_later_epochs_whenever_a_state_was_kept(tmp_path, monkeypatch, rest_s):
    monkeypatch.setattr(recorder, "REST_S", rest_s)

    outcome = train(poisoned_often(tmp_path, "train.steps=80", "train.checkpoint.every=1000"), log_format="plain")

    progress = checkpoint.load(outcome.directory / "checkpoints")[1]["progress"]
    assert np.flatnonzero(~np.isfinite(load_run(outcome.directory)["loss"])).tolist() == [*range(4, 16)]
    assert [known[:2] for known in progress["bad"]] == [[0, batch] for batch in range(4, 16)]
    ran = rerun(outcome.directory, step=60)
    assert ran.is_same, ran.differences[:3]


def test_data_that_are_bad_throughout_end_with_a_mistake_that_says_so(tmp_path):
    config = poisoned(tmp_path, "train.on_critical=skip", "train.steps=300", "data.batch_size=240", step=None)
    with np.load(tmp_path / "data.npz") as file:
        arrays = dict(file)
    arrays["y"][:] = 3e38
    arrays["y"][0] = -3e38
    np.savez(tmp_path / "data.npz", **arrays)

    with pytest.raises(GradwatchError, match=r"train\.on_critical: every batch of the data has been skipped"):
        train(config, log_format="plain")


def test_without_a_copy_in_memory_it_goes_back_to_a_checkpoint(tmp_path):
    outcome = run(tmp_path, *REWIND, "model.channels=[64, 256]", "watch.record.memory_mb=1")

    texts = [event.text for event in load_run(outcome.directory).events if event.kind == "rewind"]
    assert outcome.ending == "finished"
    assert "went back to step 20" in texts[0]


def test_a_rewind_with_nowhere_to_go_back_to_is_a_mistake_that_names_the_way_out(tmp_path):
    overrides = [*REWIND, "model.channels=[64, 256]", "watch.record.memory_mb=1", "train.checkpoint.every=30"]

    with pytest.raises(GradwatchError, match=r"raise watch\.record\.memory_mb, or set train\.checkpoint\.every"):
        run(tmp_path, *overrides)


def test_positions_skip_what_is_bad_by_place_and_by_samples(tmp_path):
    training = TrainingState.build(poisoned(tmp_path, "data.batch_size=100"))
    bad = [Position(epoch=0, batch=1, length=1).identity(training.batches)]

    steps = positions(training.batches, accumulate=1, epoch=0, batch=0, bad=bad)
    found = [(p.epoch, p.batch) for p, _ in zip(steps, range(6), strict=False)]

    assert found == [(0, 0), (0, 2), (0, 3), (0, 4), (1, 0), (1, 2)]
    assert [len(part) for part in Position(epoch=0, batch=4, length=1).indices(training.batches)] == [80]


@pytest.mark.parametrize("watch", ["watch.record.enabled=false", "watch.enabled=false"])
def test_it_stops_also_where_nothing_is_kept_or_nobody_watches(tmp_path, watch):
    outcome = run(tmp_path, "train.on_critical=stop", watch)

    assert outcome.ending == "critical"
    assert outcome.history.step in (STEP, STEP - 1)  # an unwatched run records every tenth step
