"""For every fault of the clinic the cure is found, applied and shown to work; what is written is read."""

import json
import math
from pathlib import Path

import pytest
import yaml

from gradwatch.cli import main
from gradwatch.config.load import load_config
from gradwatch.errors import RunError
from gradwatch.history.disk.writer import read
from gradwatch.incident import recorder
from gradwatch.records import Remedy
from gradwatch.replay.config_change import config_of, is_taken, reverted_settings
from gradwatch.replay.cure import Cure, to_yaml, write

ROOT = Path(__file__).parents[2]
CLINIC = sorted(p.stem for p in (ROOT / "configs" / "clinic").glob("*.yaml") if not p.stem.endswith(".cured"))
MAX_LOSS_FRAC = 0.8
"""Largest loss of a cured run, over that of the faulty one. The nearest is no-gradient, with 0.68 on each kernel."""
QUIET = ["--set", "train.threads=1", "--set", "sinks.tensorboard.enabled=false", "--log-format", "plain"]


@pytest.fixture(autouse=True)
def _snapshots_do_not_rest(monkeypatch):
    monkeypatch.setattr(recorder, "REST_S", 0.0)


def trained(config, out, *args):
    """Train from the command line, and return the exit code and the run directory."""
    code = main(["train", str(config), "--set", f"run.out={out}", *QUIET, *args])
    (directory,) = out.iterdir()
    return code, directory


def test_the_clinic_is_all_here():
    assert len(CLINIC) == 6


@pytest.mark.parametrize("fault", CLINIC)
def test_the_cure_is_found_applied_and_works(fault, clinic_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    config, cure = ROOT / "configs" / "clinic" / f"{fault}.yaml", tmp_path / "cure.yaml"
    faulty, _ = clinic_run(fault, tmp_path / "faulty")
    before = {p: p.read_bytes() for p in faulty.rglob("*") if p.is_file()}
    capsys.readouterr()

    main(["diagnose", str(faulty), "--patch", str(cure), "--format", "json"])
    said = json.loads(capsys.readouterr().out)
    code, cured = trained(config, tmp_path / "cured", "--set-file", str(cure), "--fail-on", "warning")

    assert said["cure"]["findings_left"] == []
    assert code == 0, "nothing is found any more"
    assert {p: p.read_bytes() for p in faulty.rglob("*") if p.is_file()} == before, "the run stays as it is"
    assert any(p["comes_back"] for p in said["proofs"])
    loss, ill_loss = (float(read(run)["loss"][-5:].mean()) for run in (cured, faulty))
    assert loss < MAX_LOSS_FRAC * ill_loss or math.isnan(ill_loss) or said["cure"]["patch"].keys() & {"loss"}
    accuracy, ill_accuracy = (float(read(run)["val_accuracy"][-1]) for run in (cured, faulty))
    assert accuracy > ill_accuracy - 0.02, "it learns no less"


def test_a_change_is_tried_side_by_side_from_several_seeds(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    change = tmp_path / "change.yaml"
    change.write_text("model: {detached: false}\n")
    _, run = trained(ROOT / "configs" / "clinic" / "no-gradient.yaml", tmp_path / "faulty", "--fail-on", "never")
    before = sorted(run.rglob("*"))
    capsys.readouterr()

    main(["diagnose", str(run), "--try", "40", "--seeds", "2", "--with", str(change), "--fail-on", "never"])
    told = capsys.readouterr().out
    main(["diagnose", str(run), "--try", "40", "--with", str(change), "--format", "json"])
    tried = json.loads(capsys.readouterr().out)["attempt"]

    assert "no-gradient: gone with 2 of 2 seeds" in told
    assert "final loss: better with 2 of 2 seeds, lower by" in told
    assert tried["gone"] == {"no-gradient": {"seeds": 1, "gone": 1}}
    assert tried["pairs"][0]["new"]["loss"] < tried["pairs"][0]["old"]["loss"]
    assert sorted(run.rglob("*")) == before


def test_a_try_without_a_cure_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    _, run = trained(
        ROOT / "configs" / "clinic" / "no-gradient.cured.yaml", tmp_path / "well", "--set", "train.steps=9"
    )
    capsys.readouterr()

    code = main(["diagnose", str(run), "--try", "5"])
    told = capsys.readouterr().err
    healthy = main(["diagnose", str(run), "--verify"])

    assert code == 2
    assert "name a change with --with FILE" in told
    assert healthy == 0
    assert "nothing to verify" in capsys.readouterr().out


CURE = Cure(
    changes=(
        Remedy(text="use ReLU and residual connections", patch={"model.activation": "relu", "model.residual": True}),
        Remedy(text="lower the learning rate", patch={"optim.lr": 1e-5}),
        Remedy(text="clip", patch={"train.clip": {"norm": 2.0}}),
    ),
    others=(Remedy(text="keep the rate", patch={"schedule": None}),),
    steps=60,
    before=2.0,
    after=1.0,
    accuracy=0.9,
    left=(),
)


def test_a_cure_is_written_smallest_first_with_a_reason_on_each_line():
    text = to_yaml(CURE, run=Path("runs/x"))

    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines == [
        "optim:",
        "  lr: 1e-05  # lower the learning rate",
        "train:",
        '  clip: {"norm": 2.0}  # clip',
        "model:",
        '  activation: "relu"  # use ReLU and residual connections',
        "  residual: true  # use ReLU and residual connections",
    ]
    assert "#   schedule: null  # keep the rate" in text


def test_what_is_written_is_what_is_read(tmp_path):
    config, cure = tmp_path / "mlp.yaml", tmp_path / "cure.yaml"
    config.write_text("model: {name: mlp}\ndata: {name: digits}\noptim: {name: sgd, lr: 1}\ntrain: {steps: 1}\n")

    write(CURE, cure, run=tmp_path)
    changed = load_config(config, changes=[cure])

    assert yaml.safe_load(cure.read_text())["model"] == {"activation": "relu", "residual": True}
    assert changed.optim.options["lr"] == 1e-5
    assert changed.train.clip.norm == 2.0
    assert changed.model.options == {"activation": "relu", "residual": True}


def test_a_cure_that_cannot_be_written_says_so(tmp_path):
    with pytest.raises(RunError, match=r"--patch: .*cannot be written: no such file or directory; choose another file"):
        write(CURE, tmp_path / "nowhere" / "cure.yaml", run=tmp_path)


@pytest.fixture
def run(tmp_path):
    def make(text):
        (tmp_path / "config.yaml").write_text(text)
        return tmp_path

    return make


OWN = """
model: {target: "replay.faulty:Two", share: true, scale: 1.0}
data: {name: digits}
optim: {name: sgd, lr: 1}
loss: {target: "configs.clinic.formulas:likelihood"}
schedule: {name: StepLR, step_size: 3}
train: {steps: 1, precision: bf16}
"""


def test_what_was_set_can_be_taken_back_one_by_one(run, monkeypatch):
    monkeypatch.chdir(ROOT)

    patches = [c.patch for c in reverted_settings(config_of(run(OWN)))]

    assert patches == [{"model.share": False}, {"loss": None}, {"schedule": None}, {"train.precision": "fp32"}]


def test_a_change_that_changes_nothing_or_is_not_taken_is_not_tried(run):
    path = run(OWN)

    assert is_taken(path, Remedy(text="", patch={"model.scale": 2.0}))
    assert not is_taken(path, Remedy(text="", patch={"model.scale": 1.0})), "it is so"
    assert not is_taken(path, Remedy(text="", patch={"model.normalization": "batch"})), "the model takes none"
    assert not is_taken(path, Remedy(text="", patch={"optim.nesterov": "no"})), "it is no such value"
