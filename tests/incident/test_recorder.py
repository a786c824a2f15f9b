"""Incidents are bounded, whole or not there, and never stop the training, whatever the disk does."""

import errno
import json

import pytest
import torch
from poisoned import STEP, poisoned

from gradwatch import load_run
from gradwatch.errors import CheckpointError, RunError
from gradwatch.incident import Snapshotter, warrants_incident
from gradwatch.incident.writing import FACTS
from gradwatch.records import Finding, Quantity, Severity
from gradwatch.replay.incident import Incident, incidents
from gradwatch.state import checkpoint_folder
from gradwatch.state.snapshot import Snapshot
from gradwatch.train.batches import Batches
from gradwatch.train.loop import train

pytestmark = pytest.mark.filterwarnings("ignore:train.accumulate")


def finding(severity=Severity.CRITICAL, kind="exploding-gradient", step=7):
    evidence = (Quantity(key="loss", value=float("inf")),)
    return Finding(
        code="GW102", kind=kind, layer=None, step=step, severity=severity, message="it grew", evidence=evidence
    )


def recorder(directory, **overrides):
    return Snapshotter(directory, **{"every": 10, "memory_mb": 1, "most": 2, "rest_s": 0.0} | overrides)


def write(to, step=7):
    return to.write(step=step, findings=[finding()], facts={"snapshot": None}, state={"window": [torch.ones(2)]})


@pytest.mark.parametrize(
    ("severity", "kind", "expected"),
    [
        (Severity.CRITICAL, "dead-relu", True),
        (Severity.WARNING, "non-finite", True),
        (Severity.WARNING, "dead-relu", False),
        (Severity.INFO, "overfitting", False),
    ],
)
def test_what_is_critical_or_not_finite_matters(severity, kind, expected):
    assert warrants_incident(finding(severity, kind)) is expected


def test_an_incident_reads_back_as_it_was_written(tmp_path):
    path = write(recorder(tmp_path))

    (incident,) = incidents(str(tmp_path))
    assert (incident.path, incident.step, incident.snapshot_step) == (path, 7, None)
    assert incident.findings == (finding(),)
    assert torch.equal(incident.state()["window"][0], torch.ones(2))
    assert sorted(p.name for p in path.iterdir()) == [
        FACTS,
        "manifest.json",
        "state.json",
        "tensors.safetensors",
    ]
    json.loads((path / FACTS).read_text())


def test_only_so_many_are_written(tmp_path):
    to = recorder(tmp_path)

    written = [write(to, step) for step in (3, 5, 9)]

    assert written[2] is None
    assert to.is_full
    assert [one.step for one in incidents(tmp_path)] == [3, 5]


def test_one_of_the_same_step_is_replaced(tmp_path):
    to = recorder(tmp_path)
    write(to)

    write(to)

    assert len(incidents(tmp_path)) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_costs_one_warning_and_leaves_nothing_half_written(tmp_path, monkeypatch, number):
    def write_nothing(*_):
        raise OSError(number, "no")

    monkeypatch.setattr(checkpoint_folder, "_written", write_nothing)
    to = recorder(tmp_path)

    with pytest.warns(RuntimeWarning, match="no more incidents are saved, the training continues"):
        assert write(to) is None
    assert write(to, 9) is None
    assert list((tmp_path / "incidents").iterdir()) == []


def test_a_training_goes_on_where_an_incident_cannot_be_written(tmp_path, monkeypatch):
    config = poisoned(tmp_path)
    real = checkpoint_folder.write

    def full(path, *args, **kwargs):
        if "incidents" in str(path):
            raise OSError(errno.ENOSPC, "no space left on device")
        real(path, *args, **kwargs)

    monkeypatch.setattr(checkpoint_folder, "write", full)
    with pytest.warns(RuntimeWarning, match="no more incidents are saved, .*: no space left on device$"):
        outcome = train(config, log_format="plain")

    assert outcome.ending == "finished"
    assert outcome.history.step == 39
    assert incidents(outcome.directory) == ()
    assert [f.step for f in load_run(outcome.directory).findings] == [STEP]


def test_a_training_goes_on_where_the_batch_cannot_be_read_a_second_time(tmp_path, monkeypatch):
    def unreadable(*_):
        raise FileNotFoundError("the disk with the data is gone")

    monkeypatch.setattr(Batches, "read", unreadable)
    with pytest.warns(RuntimeWarning, match="no more incidents are saved.*the data is gone"):
        outcome = train(poisoned(tmp_path), log_format="plain")

    assert outcome.ending == "finished"
    assert incidents(outcome.directory) == ()


def test_a_training_goes_on_where_its_state_cannot_be_copied(tmp_path, monkeypatch):
    def uncopyable(*_):
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(Snapshot, "take", uncopyable)
    with pytest.warns(RuntimeWarning, match="no more incidents are saved.*no memory is left"):
        outcome = train(poisoned(tmp_path), log_format="plain")

    assert outcome.history.step == 39


def test_what_a_kill_left_half_written_is_no_incident(tmp_path):
    (tmp_path / "incidents" / "step-000004.tmp").mkdir(parents=True)
    write(recorder(tmp_path))

    assert [one.step for one in incidents(tmp_path)] == [7]


def test_a_damaged_incident_is_passed_over_and_named(tmp_path):
    to = recorder(tmp_path)
    write(to, 3)
    broken = write(to, 5)
    (broken / FACTS).write_text("{")

    with pytest.warns(RuntimeWarning, match="step-000005: cannot read an incident here"):
        found = incidents(tmp_path)

    assert [one.step for one in found] == [3]


def test_a_changed_tensor_is_noticed(tmp_path):
    path = write(recorder(tmp_path))
    data = bytearray((path / "tensors.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "tensors.safetensors").write_bytes(data)

    with pytest.raises(CheckpointError, match="does not match its checksum"):
        incidents(tmp_path)[0].state()


def test_an_incident_of_a_newer_gradwatch_says_so(tmp_path):
    path = write(recorder(tmp_path))
    (path / FACTS).write_text(json.dumps(json.loads((path / FACTS).read_text()) | {"format": 99}))

    with pytest.raises(RunError, match="update gradwatch"):
        Incident.read(path)


def test_snapshots_are_due_every_so_many_steps(tmp_path):
    to = recorder(tmp_path)

    for step in (0, 10, 23):
        assert step >= to.due
        to.keep(step, {"a": torch.full((3,), float(step))})
        assert torch.equal(to.read()["a"], torch.full((3,), float(step)))

    assert (to.step, to.due) == (23, 30)


def test_where_steps_are_short_snapshots_rest(tmp_path):
    to = recorder(tmp_path, rest_s=3600.0)
    assert to.is_rested(0)
    to.keep(0, {})

    assert not to.is_rested(10)
    assert to.due == 20


def test_a_state_above_the_limit_is_not_kept_and_the_reason_told(tmp_path):
    to = recorder(tmp_path)

    told = to.keep(0, {"a": torch.zeros(1 << 19)})

    assert "takes 2 MB, watch.record.memory_mb allows 1" in told
    assert to.read() is None
    assert to.due > 10**9
