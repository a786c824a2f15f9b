"""A run of the user's own loop that goes on after a checkpoint, or that replaces an earlier run."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.errors import GradwatchError, RunError


def make(*, width=16, activation=nn.ReLU, split=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), activation(), nn.Linear(width, 4))
    groups = [{"params": layer.parameters()} for layer in (model[0], model[2])] if split else model.parameters()
    return model, torch.optim.SGD(groups, lr=0.1)


def train(run, *, steps=20, made=None, spoil=None, **options):
    """Train some steps, and return the closed monitor."""
    model, optimizer = made or make()
    with gradwatch.watch(model, optimizer, run=run, **options) as monitor:
        for step in range(steps):
            if step == spoil:
                nn.init.constant_(model[0].bias, -1e3)
            loss = model(torch.randn(32, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    return monitor


def said(capsys):
    """The lines about the directory."""
    return [line for line in capsys.readouterr().err.splitlines() if "details" not in line and "problems" not in line]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return "mine"


def steps_on_disk(run):
    return gradwatch.load_run(run).history.steps("loss").tolist()


@pytest.mark.parametrize(
    ("resume", "steps", "note"),
    [
        (True, range(40), "continues at step 20"),
        (20, range(40), "continues at step 20"),
        (12, range(32), "continues at step 12; steps 12 to 19 were deleted"),
        (0, range(20), "continues at step 0; steps 0 to 19 were deleted"),
        (23, [*range(20), *range(23, 43)], "continues at step 23; steps 20 to 22 were not recorded"),
    ],
)
def test_a_run_goes_on_where_the_checkpoint_is(resume, steps, note, run, capsys):
    header = train(run).run_dir / "run.json"
    created = "2026-01-02T03:04:05+00:00"
    header.write_text(re.sub(r'"created": "[^"]+"', f'"created": "{created}"', header.read_text()))
    capsys.readouterr()

    monitor = train(run, resume=resume, total_steps=100)

    assert said(capsys) == [f"gradwatch: mine {note}"]
    assert steps_on_disk(run) == monitor.history.steps("loss").tolist() == list(steps)
    assert (gradwatch.load_run(run).info.total_steps, str(monitor.run_dir)) == (100, run)
    assert (gradwatch.load_run(run).info.created == created) == bool(resume), "a run without any step begins again"


@pytest.mark.parametrize(("resume", "first"), [(True, 0), (200, 200)])
def test_without_a_run_one_begins_and_the_next_call_continues_it(resume, first, run, capsys):
    train(run, resume=resume)
    train(run, resume=True)

    assert said(capsys) == [
        f"gradwatch: mine has no run to resume; a new one begins at step {first}",
        f"gradwatch: mine continues at step {first + 20}",
    ]
    assert steps_on_disk(run) == list(range(first, first + 40))


def test_what_a_run_has_found_stays_found(run, capsys):
    made = make()
    found = train(run, made=made, steps=60, spoil=10).findings()
    assert "dead-relu" in {finding.kind for finding in found}
    capsys.readouterr()

    resumed = train(run, made=made, steps=60, resume=True)

    assert set(found) <= set(resumed.findings())
    assert resumed.history.withdrawn == []
    assert not re.search(r"^gradwatch: .*\(found at step", capsys.readouterr().err, re.M), "not told again"
    assert train(run, made=make(), resume=5).findings() == (), "cut off with the steps that they were found at"


@pytest.mark.parametrize(
    ("made", "difference"),
    [
        ({"width": 32}, "parameter 1 was '0.weight' (16x8) and is '0.weight' (32x8)"),
        ({"activation": nn.GELU}, "activation '1' was ReLU and is GELU"),
        ({"split": True}, "parameter '2.weight' was in optimizer group 0 and is in optimizer group 1"),
    ],
)
def test_another_model_is_refused_with_the_first_difference_and_leaves_no_hook(made, difference, run):
    train(run)
    model, optimizer = make(**made)

    with pytest.raises(RunError) as refused:
        gradwatch.watch(model, optimizer, run=run, resume=12)

    assert str(refused.value) == (
        f"resume: mine is the run of another model or optimizer: {difference}. Build both as in that run, or leave "
        "resume out to begin another run"
    )
    assert steps_on_disk(run) == list(range(20)), "nothing was cut"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    train(run, resume=True)


def test_a_model_with_fewer_parameters_is_another(run):
    train(run)
    model, optimizer = make()

    with pytest.raises(RunError, match=r"parameter 3 was '2.weight' \(4x16\) and is missing"):
        gradwatch.watch(model[:2], optimizer, run=run, resume=True)


HOLD = """
import fcntl, sys
lock = open(sys.argv[1], "a")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_run_that_another_process_writes_is_left_alone(run):
    train(run)
    command = [sys.executable, "-S", "-c", HOLD, f"{run}/history/lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        for options in ({"resume": True}, {"resume": 5}, {"resume": 0}, {"overwrite": True}):
            with pytest.raises(RunError, match="mine: another process is writing to this run; stop it first"):
                gradwatch.watch(*make(), run=run, **options)
        other.communicate()

    assert steps_on_disk(run) == list(range(20))
    train(run, resume=True)


@pytest.mark.parametrize("option", ["resume", "overwrite"])
def test_a_run_that_another_monitor_writes_is_left_alone(option, run):
    with gradwatch.watch(*make(), run=run) as monitor:
        monitor.step(1.0)
        with pytest.raises(RunError, match=r"another monitor of this process is writing to this run; close\(\) it"):
            gradwatch.watch(*make(), run=run, **{option: True})

    assert steps_on_disk(run) == [0]


def test_overwrite_replaces_the_run_and_nothing_else(run, tmp_path, capsys):
    train(run)
    kept = {
        "weights.pt": b"mine",
        "events.out.tfevents.1795648465.host.1.0": b"of another writer",
        "history/mine": b"x",
    }
    for name, content in kept.items():
        (tmp_path / run / name).write_bytes(content)
    before = set((tmp_path / run).glob("events.out.*"))
    capsys.readouterr()

    train(run, steps=5, made=make(width=32), overwrite=True)

    assert said(capsys) == []
    assert steps_on_disk(run) == list(range(5))
    assert {name: (tmp_path / run / name).read_bytes() for name in kept} == kept
    after = set((tmp_path / run).glob("events.out.*"))
    assert [path.name for path in after & before] == ["events.out.tfevents.1795648465.host.1.0"]


def test_overwrite_begins_in_a_missing_directory_and_in_one_of_other_files(run, tmp_path):
    train(run, steps=3, overwrite=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "report.html").write_text("not of a run")

    monitor = gradwatch.watch(*make(), run="other", overwrite=True)

    assert (tmp_path / "other" / "report.html").read_text() == "not of a run"
    monitor.close()
    assert steps_on_disk(run) == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "history/mine.csv",
            "1",
            "mine has a folder `history` but no run.json, so it is not a run: nothing was deleted",
        ),
        ("run.json", "{}", "so the run cannot be read"),
    ],
)
def test_overwrite_deletes_nothing_that_may_not_be_a_run(name, content, message, run, tmp_path):
    (tmp_path / run / "history").mkdir(parents=True)
    (tmp_path / run / name).write_text(content)

    with pytest.raises(GradwatchError, match=re.escape(message)):
        gradwatch.watch(*make(), run=run, overwrite=True)

    assert (tmp_path / run / name).read_text() == content


def test_a_resumed_training_is_bit_identical(run):
    losses = []
    for resume in (None, True):
        model, optimizer = make()
        torch.manual_seed(3)
        if resume:
            train(run, made=(model, optimizer), resume=resume)
        else:
            for _ in range(20):
                loss = model(torch.randn(32, 8)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        losses.append(model(torch.ones(1, 8)).detach().numpy())

    np.testing.assert_array_equal(*losses)
