"""`gradwatch attribute` explains samples of a run or a config, and writes one self-contained page."""

import html
import json
import re
import shutil

import pytest

from gradwatch.cli.output.worst_samples import add_worst_samples
from gradwatch.run import load_run

CONFIG = """\
model: {name: mlp, depth: 1, width: 16}
data: {name: digits}
optim: {name: adamw, lr: 1e-2}
train: {steps: 20}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the directory of a short run, whose report as the training left it is in `report-at-the-end.html`."""
    from gradwatch.cli import main

    folder = tmp_path_factory.mktemp("attribute")
    (folder / "small.yaml").write_text(CONFIG)
    settings = ["--set", f"run.out={folder}/runs", "--set", "run.worst_samples=2"]
    assert main(["train", str(folder / "small.yaml"), *settings, "--fail-on", "never"]) == 0
    made = next((folder / "runs").iterdir())
    (made / "report-at-the-end.html").write_bytes((made / "report.html").read_bytes())
    return made


def test_a_training_puts_its_worst_samples_with_their_maps_into_its_report(gradwatch, run):
    report = (run / "report-at-the-end.html").read_text()
    alone = json.loads(gradwatch("attribute", run, "--worst", "1", "--format", "json").out)["maps"][0]

    assert '<section id="maps"' in report
    assert report.count('src="data:image/png;base64,') >= 2
    assert f"sample {alone['sample']}: label {alone['label']}" in report


def test_the_worst_samples_come_in_the_order_of_their_losses(gradwatch, run):
    done = gradwatch("attribute", run, "--worst", "2", "--format", "json")

    found = json.loads(done.out)
    worst, second = found["maps"]
    alone = json.loads(gradwatch("attribute", run, "--sample", worst["sample"], "--format", "json").out)["maps"]
    assert found["model"] == f"{run.name} at step 20"
    assert worst["loss"] >= second["loss"]
    assert alone == [worst]
    assert worst["label"] != worst["explained"]
    assert len(worst["map"]) == 64
    assert worst["gap"] <= 0.01
    assert done.code == int(any(one["verdict"] == "misleads" for one in found["maps"]))


def test_html_is_one_file_in_the_run_that_loads_nothing(gradwatch, run):
    done = gradwatch("attribute", run, "--sample", "3", "--method", "occlusion", "--format", "html")

    page = (run / "attributions.html").read_text()
    assert done.code in (0, 1)
    assert page.count('src="data:image/png;base64,') == 1
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    assert "sample 3: label" in page
    assert "completeness" in page
    assert '<section id="maps"' in (run / "report.html").read_text()


def test_without_captum_the_report_says_how_to_get_the_maps(run, tmp_path, monkeypatch, capsys):
    shutil.copytree(run, tmp_path / "run")
    recorded = load_run(tmp_path / "run")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    add_worst_samples(tmp_path / "run", recorded.history, recorded.diagnoses, count=2)

    report, way_out = (tmp_path / "run" / "report.html").read_text(), "pip install 'gradwatch[attribute]'"
    assert way_out in html.unescape(report)
    assert f"gradwatch attribute {tmp_path / 'run'} --worst 2 --format html" in report
    assert "the package captum is not installed" in capsys.readouterr().err


TEXT = """\
model: {name: gpt, layers: 1, heads: 1, width: 8}
data: {name: text, context: 6}
optim: {name: adamw, lr: 1e-2}
train: {steps: 1}
"""


def test_a_text_is_explained_by_its_characters(gradwatch, tmp_path):
    config = tmp_path / "text.yaml"
    config.write_text(TEXT)

    done = gradwatch("attribute", config, "--sample", "2", "--method", "saliency", "--format", "json")

    (found,) = json.loads(done.out)["maps"]
    assert len(found["names"]) == len(found["map"]) == 6
    assert all(len(name) == 1 for name in found["names"])
    assert re.fullmatch("'.*' at the end", found["explained"])


def test_a_config_is_explained_with_its_initial_weights(gradwatch, run):
    done = gradwatch("attribute", run.parents[1] / "small.yaml", "--sample", "0", "--method", "saliency")

    assert "small.yaml, untrained; validation data\n\nsample 0: label " in done.out
    assert re.search(r"^the map.*saliency for output \d$", done.out, re.M)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere",), "attribute: there is no file or folder 'nowhere'"),
        (("RUN", "--sample", "9999"), "--sample: got 9999, expected 0 to 358"),
        (("RUN", "--sample", "1", "--worst", "1"), "--sample and --worst: got both"),
        (("RUN", "--set", "run.seed=1"), "--set: has no meaning for"),
        (("CONFIG", "--format", "html"), "--format: html needs a run directory"),
        (("RUN", "--sample", "0", "--method", "gradcam"), "method: gradcam needs a model with a Conv2d"),
    ],
)
def test_a_mistake_is_one_error(gradwatch, run, words, message):
    known = {"RUN": run, "CONFIG": run.parents[1] / "small.yaml"}

    done = gradwatch("attribute", *(known.get(word, word) for word in words))

    assert done.code == 2
    assert message in done.err.replace("\n", " ")
