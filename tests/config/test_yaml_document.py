"""A config as it was written: where things stand, and what overrides change."""

import pytest

from gradwatch.config.yaml_document import Document, read
from gradwatch.errors import ConfigError, Problem

TEXT = """\
# a comment
train:
  precision: fp16
  clip:
    norm: 1.0
optim:
  groups:
    - match: a
    - match: b
      lr: 1
detect:
  DeadLayer: {every: 5}
"""


@pytest.fixture
def document():
    return Document(TEXT, file="mlp.yaml")


def place(document, *key):
    (problem,) = document.place_problems([Problem(key, "wrong")])
    return problem.place


@pytest.mark.parametrize(
    ("key", "line"),
    [
        (("train",), 2),
        (("train", "precision"), 3),
        (("train", "clip", "norm"), 5),
        (("train", "missing"), 2),
        (("train", "clip", "value", "deep"), 4),
        (("optim", "groups", 1), 9),
        (("optim", "groups", 1, "lr"), 10),
        (("detect", "DeadLayer", "every"), 12),
    ],
)
def test_a_mistake_has_the_line_of_its_key_or_of_the_mapping_around_it(document, key, line):
    assert place(document, *key) == f"mlp.yaml, line {line}"


def test_a_mistake_about_the_whole_file_has_no_line(document):
    assert place(document, "model") == "mlp.yaml"


def test_problems_come_in_the_order_of_their_lines_and_the_first_of_a_key_counts(document):
    found = [
        Problem(("optim",), "b"),
        Problem(("train", "clip"), "a"),
        Problem(("model",), "0"),
        Problem(("optim",), "late"),
    ]

    assert [p.text for p in document.place_problems(found)] == ["0", "a", "b"]


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.precision=bf16", ("train", "precision"), "bf16"),
        ("train.lr=3e-4", ("train", "lr"), 3e-4),
        ("train.clip={value: 2}", ("train", "clip"), {"value": 2}),
        ("schedule.name=cosine", ("schedule", "name"), "cosine"),
        ("optim.groups.1.lr=5", ("optim", "groups", 1, "lr"), 5),
        ("optim.groups.0={match: c}", ("optim", "groups", 0), {"match": "c"}),
        ("optim.betas=[0.9, 0.95]", ("optim", "betas"), [0.9, 0.95]),
        ("train.clip=", ("train", "clip"), None),
        ("model.target=a.b:c=d", ("model", "target"), "a.b:c=d"),
        ("detect.dead-layer.every=7", ("detect", "DeadLayer", "every"), 7),
    ],
)
def test_an_override_sets_a_value_and_is_its_place(document, override, key, value):
    document.override([override], excludes={})

    here = document.data
    for part in key:
        here = here[part]
    assert here == value
    assert place(document, *key) == f"--set {override}"


def test_the_last_of_two_overrides_counts(document):
    document.override(["train.precision=fp32", "train.precision=bf16"], excludes={})

    assert document.data["train"]["precision"] == "bf16"
    assert place(document, "train", "precision") == "--set train.precision=bf16"


def test_a_section_that_an_override_made_is_placed_at_the_override(document):
    document.override(["early.stop.patience=3"], excludes={})

    assert place(document, "early", "stop") == "--set early.stop.patience=3"
    assert place(document, "train") == "mlp.yaml, line 2"


def test_an_override_removes_what_it_excludes_unless_that_is_overridden_too(document):
    excludes = {("train", "steps"): ("train", "precision"), ("train", "epochs"): ("train", "steps")}

    document.override(["train.steps=3"], excludes=excludes)
    assert "precision" not in document.data["train"]

    document.override(["train.epochs=2"], excludes=excludes)
    assert document.data["train"]["steps"] == 3, "both were asked for: that is a mistake to report, not to hide"


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("train.epochs", "--set train.epochs: expected section.setting=value, such as optim.lr=3e-4"),
        ("=3", "--set =3: expected section.setting=value"),
        ("train..x=3", "--set train..x=3: expected section.setting=value"),
        ("optim.lr=[1", "optim.lr: got '[1', which is not YAML: expected ',' or ']', but got '<stream end>'"),
        ("train.precision.x=3", "train.precision.x: train.precision is 'fp16', expected a mapping to set x in"),
        ("optim.groups.5.lr=3", "optim.groups.5.lr: optim.groups has no item 5, expected 0 to 1"),
        ("optim.groups.x=3", "optim.groups.x: optim.groups has no item x, expected 0 to 1"),
        ("a={b: 1, b: 2}", "a.b: is set twice"),
    ],
)
def test_an_override_that_cannot_be_made_is_a_mistake(document, override, text):
    document.override([override], excludes={})

    (problem,) = document.place_problems([])
    assert str(problem).startswith(text)
    assert override in str(problem)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "mlp.yaml: is not YAML: expected ',' or ']', but got '<stream end>' (line 1, column 6)"),
        ("a: b: c", "mlp.yaml: is not YAML: mapping values are not allowed here; put text with a colon in quotes"),
        ("a:\n\tb: 1", "mlp.yaml: is not YAML: found character '\\t' that cannot start any token; indent with spaces"),
        ("a:\n  b: 1\n c: 2", "is the indentation of this line right? (line 3, column 2)"),
        ("a: 1\n---\nb: 2", "mlp.yaml: is not YAML: found another document; write one document, without a second"),
        ("a: \x01", "mlp.yaml: is not YAML: special characters are not allowed"),
        ("*x", "mlp.yaml: is not YAML: found undefined alias 'x' (line 1, column 1)"),
        ("", "mlp.yaml: is empty, expected sections such as model, data and train"),
        ("# only a comment", "mlp.yaml: is empty"),
        ("- 1", "mlp.yaml: holds [1], expected sections such as model, data and train"),
        ("just text", "mlp.yaml: holds 'just text', expected sections"),
    ],
)
def test_text_that_is_no_mapping_is_one_clear_mistake(text, message):
    with pytest.raises(ConfigError) as caught:
        Document(text, file="mlp.yaml")

    assert len(caught.value.problems) == 1
    assert message in str(caught.value)


def test_a_missing_file_is_a_mistake_that_suggests_a_near_one(tmp_path):
    (tmp_path / "quickstart.yaml").write_text("a: 1")

    with pytest.raises(ConfigError, match=r"quikstart\.yaml: there is no such file; did you mean 'quickstart\.yaml'\?"):
        read(tmp_path / "quikstart.yaml")


def test_a_file_in_a_missing_folder_is_a_mistake(tmp_path):
    with pytest.raises(ConfigError, match=r"x\.yaml: there is no such file$"):
        read(tmp_path / "nowhere" / "x.yaml")


def test_a_folder_is_a_mistake_and_a_run_directory_is_to_be_resumed(tmp_path):
    with pytest.raises(ConfigError, match=r"is a folder, expected a YAML file$"):
        read(tmp_path)

    (tmp_path / "config.yaml").write_text("a: 1")
    with pytest.raises(ConfigError, match="to continue that run: gradwatch train --resume"):
        read(tmp_path)


def test_a_file_that_is_no_text_is_a_mistake(tmp_path):
    (tmp_path / "weights.yaml").write_bytes(b"\x80\x02\xff\x00")

    with pytest.raises(ConfigError, match=r"weights\.yaml: is not text in UTF-8"):
        read(tmp_path / "weights.yaml")
