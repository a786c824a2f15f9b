"""The start of `gradwatch train`: what it says about the data, and which data end it with exit code 2."""

import json

import numpy as np
import pytest
from real_formats import write_folder

QUIET = "sinks: {html: {enabled: false}, tensorboard: {enabled: false}}\n"
CONFIG = "model: {{name: mlp, depth: 2, width: 4}}\ndata: {data}\noptim: {{name: adamw, lr: 1e-3}}\ntrain: {train}\n"


@pytest.fixture
def train(gradwatch, tmp_path, monkeypatch):
    """Return a function that trains on data in the current folder, and returns the exit code and the output."""
    monkeypatch.chdir(tmp_path)

    def train(data, settings="{epochs: 2}", *args):
        (tmp_path / "c.yaml").write_text(CONFIG.format(data=data, train=settings) + QUIET)
        return gradwatch("train", "c.yaml", "--log-format", "plain", "--fail-on", "never", *args)

    return train


@pytest.fixture
def table(tmp_path):
    rows = "".join(f"{i % 7},{i % 3},{i * 1000 + 500},{i / 7}\n" for i in range(60))
    (tmp_path / "t.csv").write_text("a,group,price,ratio\n" + rows)


def test_the_start_names_run_model_data_and_length(train, table):
    result = train("{name: csv, file: t.csv, target_column: group, features: [a], batch_size: 8}")

    run, model, data, length, first = result.out.splitlines()[:5]
    assert result.code == 0
    assert run.startswith("run     runs/")
    assert model == "model   23 parameters in 4 tensors, AdamW, fp32, cpu"
    assert data == (
        "data    csv: 48 samples for training, 12 for validation; 3 classes (guessed from whole numbers in column "
        "'group')"
    )
    assert length == "length  2 epochs x 6 steps = 12 steps"
    assert first.startswith("step 0/12")


def test_data_and_length_are_kept_in_the_run(train, gradwatch, table):
    run = train("{name: csv, file: t.csv, target_column: ratio, batch_size: 8}", "{steps: 9}").out.split()[1]

    info = json.loads(gradwatch("diagnose", run, "--format", "json").out)["run"]

    assert info["data"] == {
        "name": "csv",
        "samples": 48,
        "held_out": 12,
        "kind": "values",
        "outputs": 1,
        "guess": "fractions in column 'ratio'",
    }
    assert info["steps_per_epoch"] == 6
    again = gradwatch(
        "train", "--resume", run, "--set", "train.steps=10", "--log-format", "plain", "--fail-on", "never"
    )
    assert "length  10 steps, 1.67 epochs of 6 steps" in again.out


def test_prices_are_not_trained_on_as_classes(train, table):
    result = train("{name: csv, file: t.csv, target_column: price, features: [a]}")

    assert result.code == 2
    assert "data.kind: column 'price' has 60 different labels in 60 samples" in result.err
    assert "expected data.kind: values" in result.err


@pytest.mark.parametrize(
    ("data", "settings", "key"),
    [
        ("{name: csv, file: pairs.csv}", "{epochs: 1, early_stop: {metric: val_loss}}", "train.early_stop"),
        ("{name: csv, file: pairs.csv}", "{epochs: 1, checkpoint: {best: true}}", "train.checkpoint.best"),
        ("{name: text, file: t.txt, context: 4, val_fraction: 0.0}", "{epochs: 1, early_stop: {}}", "train.early_stop"),
    ],
)
def test_a_metric_of_validation_needs_samples_for_it(train, tmp_path, data, settings, key):
    # a fifth of two samples rounds to none
    (tmp_path / "pairs.csv").write_text("a,b\n" + "".join(f"{i},{i // 2}\n" for i in range(8)))
    (tmp_path / "t.txt").write_text("abcd" * 20)

    result = train(data, settings)

    assert result.code == 2
    assert f"error: {key}: needs a validation part" in result.err
    assert not list(tmp_path.glob("runs/*")), "no run directory is left"


def test_an_accuracy_of_values_is_never_measured(train, table):
    data = "{name: csv, file: t.csv, target_column: ratio}"

    result = train(data, "{epochs: 1, early_stop: {metric: val_accuracy}}")

    assert result.code == 2
    assert (
        "val_accuracy is not measured on values, which csv has (guessed from fractions in column 'ratio')" in result.err
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_picture_ends_the_training_with_its_path(train, tmp_path, workers):
    write_folder(tmp_path / "pics", each=6)
    damaged = tmp_path / "pics" / "dog" / "3.png"
    damaged.write_bytes(damaged.read_bytes()[:50])

    result = train(f"{{name: ImageFolder, root: pics, batch_size: 2, workers: {workers}, val_fraction: 0.0}}")

    assert result.code == 2
    assert "error: data: pics/dog/3.png is missing, damaged or not a picture" in result.err


def test_notes_about_the_data_are_warnings_once(train, tmp_path):
    write_folder(tmp_path / "pics" / "train", classes=("ant", "bee", "cat"))
    write_folder(tmp_path / "pics" / "val", classes=("cat", "bee"))
    (tmp_path / "pics" / "val" / ".ipynb_checkpoints").mkdir()

    err = train("{name: ImageFolder, root: pics, batch_size: 4}").err

    assert err.count("warning: data: no validation sample belongs to 1 of 3 classes: ant") == 1
    assert err.count("warning: data.root: these folders of pics/val are hidden or without a picture: .ipynb_check") == 1


def test_validation_on_folders_with_a_class_less_counts_what_is_right(train, tmp_path):
    """The classes differ in brightness, so every picture is told apart in a few steps."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for part, names in (("train", ("ant", "bee", "cat")), ("val", ("bee", "cat"))):
        for name in names:
            folder = tmp_path / "pics" / part / name
            folder.mkdir(parents=True)
            for i in range(12):
                level = {"ant": 0, "bee": 100, "cat": 200}[name]
                pixels = np.full((4, 4, 3), level + rng.integers(0, 30), np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")

    out = train(
        "{name: ImageFolder, root: pics, batch_size: 12}",
        "{epochs: 60}",
        *("--set", "model.width=16", "--set", "optim.lr=0.03"),
    ).out

    assert "accuracy 100 %" in out
