"""A run that is damaged, unfinished or none says how to go on."""

import shutil

import pytest
from end_to_end.bad_input.commands import CONFIG, settings

from gradwatch.cli import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a finished run with three checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "base.yaml").write_text(CONFIG)
    arguments = settings(
        f"run.out={folder}/runs", "train.steps=30", "train.checkpoint={every: 10, keep: 3, best: false}"
    )
    assert main(["train", str(folder / "base.yaml"), *arguments]) == 0
    (run,) = folder.glob("runs/*")
    return run


@pytest.fixture
def run(trained, folder, capsys):
    """Return a copy of it, in the folder to work in."""
    capsys.readouterr()
    shutil.copytree(trained, folder / "runs" / "one")
    return folder.joinpath("runs", "one").relative_to(folder)


def damage(checkpoint, how):
    tensors = checkpoint / "tensors.safetensors"
    data = bytearray(tensors.read_bytes())
    if how == "truncated":
        del data[100:]
    elif how == "flipped":
        data[len(data) // 2] ^= 1
    elif how == "foreign":
        data = bytearray(b"PK\x03\x04 somebody's torch.save")
    else:
        (checkpoint / "state.json").unlink()
    tensors.write_bytes(data)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("truncated", "tensors.safetensors has 100 bytes, expected "),
        ("flipped", "tensors.safetensors does not match its checksum"),
        ("foreign", "tensors.safetensors has 26 bytes, expected "),
        ("incomplete", "state.json is missing"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(train, run, how, reason):
    damage(run / "checkpoints" / "step-000030", how)

    code, out, err = train("--resume", run, *settings("train.steps=32"))

    assert code == 0, err
    assert err.startswith(f"warning: {run}/checkpoints/step-000030 is damaged: {reason}")
    assert err.endswith(f". Going back to {run}/checkpoints/step-000020.\n")
    assert "32 steps" in out


def test_no_good_checkpoint_is_a_mistake(train, run):
    for checkpoint in run.glob("checkpoints/*"):
        damage(checkpoint, "truncated")

    code, out, err = train("--resume", run)

    assert (code, out) == (2, "")
    assert err.count(" is damaged: tensors.safetensors has 100 bytes, expected ") == 3
    assert err.endswith(". There is no good checkpoint left.\n")
    assert run.is_dir(), "only a new run is removed"


def test_a_run_without_a_checkpoint_says_how_to_train_anew(train, run):
    shutil.rmtree(run / "checkpoints")

    code, _, err = train("--resume", run)

    assert (code, err) == (
        2,
        f"error: {run}: the run ended before its first checkpoint, so there is nothing to resume; train it again: "
        f"gradwatch train {run}/config.yaml\n",
    )


def test_a_finished_run_that_is_resumed_says_how_to_go_on(train, run):
    code, out, err = train("--resume", run)

    assert code == 0
    assert err == (
        "warning: the run has made all of its 30 steps; to continue, give it more with --set train.steps=...\n"
    )
    assert "no problems found" in out


def test_a_run_cannot_end_before_where_it_has_come_to(train, run):
    before = (run / "config.yaml").read_text()

    code, out, err = train("--resume", run, *settings("train.steps=20"))

    assert (code, out) == (2, "")
    assert err == (
        "error: train.steps: got 20 steps, but the run has made 30; "
        "to continue, give it more with --set train.steps=...\n"
    )
    assert (run / "config.yaml").read_text() == before


def test_what_a_resume_changes_holds_for_the_next(train, run):
    train("--resume", run, *settings("train.steps=32"))

    _, out, err = train("--resume", run)

    assert "all of its 32 steps" in err
    assert "no problems found  " in out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.width=9", "model.width: the run has 8, got 9"),
        ("optim.name=sgd", "optim.name: the run has AdamW, got SGD"),
        ("optim.lr=1", "optim.lr: the run has 0.001, got 1.0"),
        ("schedule={name: StepLR, step_size: 3}", "schedule.name: the run has nothing, got StepLR; schedule.step_size"),
        ("data.batch_size=32", "data.batch_size: the run has 64, got 32"),
        ("run.seed=1", "run.seed: the run has 0, got 1"),
        ("watch.enabled=false", "watch.enabled: the run has True, got False"),
    ],
)
def test_a_config_that_no_longer_fits_the_run_is_a_mistake(train, run, override, message):
    before = (run / "config.yaml").read_text()

    code, out, err = train("--resume", run, *settings(override))

    assert (code, out) == (2, "")
    assert err.startswith(f"error: --resume: {message}")
    assert err.endswith("Leave these settings as they are, or train again from the start\n")
    assert (run / "config.yaml").read_text() == before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["diagnose", "."], ". is not a run directory: it has no run.json"),
        (["diagnose", "runs"], "runs is not a run directory: it has no run.json; it contains runs, the last of them "),
        (["diagnose", "base.yaml"], "base.yaml is not a run directory: it has no run.json"),
        (["diagnose", "runs/onne"], "runs/onne: there is no such run directory; did you mean 'one'?"),
        (["train", "--resume", "."], "--resume: . is not a run of `gradwatch train`: it has no config.yaml"),
        (
            ["train", "--resume", "runs"],
            "--resume: runs is not a run of `gradwatch train`: it has no config.yaml; it cont",
        ),
        (["train", "--resume", "gone"], "--resume: there is no run directory gone"),
        (
            ["train", "runs/one"],
            "runs/one: is a folder, expected a YAML file; to continue that run: gradwatch train ",
        ),
    ],
)
def test_a_run_directory_that_is_none_is_a_mistake(run, capsys, args, message):
    code = main(args)

    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("status", "told"),
    [
        ("running", "killed at step 30"),
        ("interrupted", "interrupted at step 30"),
        ("failed", "failed at step 30"),
    ],
)
def test_a_diagnosis_says_of_a_run_that_is_not_finished_how_to_go_on(run, capsys, status, told):
    header = (run / "run.json").read_text()
    (run / "run.json").write_text(header.replace('"status": "finished"', f'"status": "{status}"'))

    main(["diagnose", str(run), "--fail-on", "never"])

    shown = capsys.readouterr()
    assert shown.out.splitlines()[1].strip() == told
    assert shown.err == f"note: to continue the run: gradwatch train --resume {run}\n"
