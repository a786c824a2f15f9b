"""Where a key was written: line, column, and the characters that a message underlines."""

import pytest

from gradwatch.config.yaml_document import Document
from gradwatch.errors import ConfigError, Problem

TEXT = """\
train:
  precision: fp8
  clip: {norm: 1.0}
optim:
  groups:
    - match: a
    - {match: b, lr: x}
watch:
"""


def underlined(excerpt):
    """Return the place of an excerpt and the characters that it underlines."""
    start = excerpt.column - 1
    return excerpt.name, excerpt.line, excerpt.text[start : start + excerpt.width]


def excerpt(overrides, key, *, is_about_key=False):
    document = Document(TEXT, file="mlp.yaml")
    document.override(overrides, excludes={})
    (problem,) = document.place_problems([Problem(key, "wrong", is_about_key=is_about_key)])
    return problem.excerpt


@pytest.mark.parametrize(
    ("key", "is_about_key", "line", "text"),
    [
        (("train", "precision"), False, 2, "fp8"),
        (("train", "precision"), True, 2, "precision"),
        (("train", "clip"), False, 3, "{norm: 1.0}"),
        (("train", "clip", "norm"), False, 3, "1.0"),
        (("train", "clip", "value"), False, 3, "clip"),
        (("train",), False, 1, "train"),
        (("optim", "groups", 0), False, 6, "match: a"),
        (("optim", "groups", 1), False, 7, "{match: b, lr: x}"),
        (("optim", "groups", 1, "lr"), False, 7, "x"),
        (("watch",), False, 8, "watch"),
    ],
)
def test_a_mistake_in_a_file_underlines_its_value_or_its_name(key, is_about_key, line, text):
    assert underlined(excerpt([], key, is_about_key=is_about_key)) == ("mlp.yaml", line, text)


@pytest.mark.parametrize(
    ("override", "key", "is_about_key", "text"),
    [
        ("train.precision=fp8", ("train", "precision"), False, "fp8"),
        ("train.precison=fp8", ("train", "precison"), True, "precison"),
        ("optimizer.lr=3", ("optimizer",), True, "optimizer"),
        ("loss={name: mse, reduction: none}", ("loss", "reduction"), False, "none"),
        ("loss={name: mse, reducton: none}", ("loss", "reducton"), True, "reducton"),
        ("loss={name: mse}", ("loss", "weight"), False, "{name: mse}"),
        ("train.clip=", ("train", "clip"), False, "clip"),
        ("optim.groups.1.lr=y", ("optim", "groups", 1, "lr"), False, "y"),
        ("train.clip={norm: 1,\n  value: 2}", ("train", "clip", "value"), False, "2"),
    ],
)
def test_a_mistake_in_an_override_underlines_its_part(override, key, is_about_key, text):
    assert underlined(excerpt([override], key, is_about_key=is_about_key)) == ("command line", 0, text)


def test_a_malformed_override_is_underlined_whole():
    document = Document(TEXT, file="mlp.yaml")
    document.override(["optim.lr"], excludes={})

    (problem,) = document.place_problems([])
    assert underlined(problem.excerpt) == ("command line", 0, "optim.lr")


def test_a_mistake_in_a_merged_file_underlines_that_file():
    document = Document(TEXT, file="mlp.yaml")
    document.merge(Document("# a cure\ntrain:\n  precision: fp9\n", file="cure.yaml"), excludes={})

    (problem,) = document.place_problems([Problem(("train", "precision"), "wrong")])
    assert underlined(problem.excerpt) == ("cure.yaml", 3, "fp9")


def test_a_mistake_with_the_whole_file_underlines_nothing():
    assert underlined(excerpt([], ("model",))) == ("mlp.yaml", 0, "")


@pytest.mark.parametrize(
    ("text", "place", "line"),
    [("a: [1", (1, 6), "a: [1"), ("a: [1\n", (1, 6), "a: [1"), ("a: b: c", (1, 5), "a: b: c")],
)
def test_text_that_is_not_yaml_shows_the_line_that_cannot_be_read(text, place, line):
    with pytest.raises(ConfigError) as caught:
        Document(text, file="mlp.yaml")

    shown = caught.value.problems[0].excerpt
    assert ((shown.line, shown.column), shown.text) == (place, line)
