"""YAML 1.2 in, and out so that it reads back equal."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.config.yaml12 import compose, to_data, write


def read(text):
    data, problems = to_data(compose(text))
    assert not problems
    return data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1e5", 1e5),
        (".5", 0.5),
        ("5.", 5.0),
        ("-.inf", -math.inf),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("+3", 3),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("yes", "yes"),
        ("off", "off"),
        ("True", True),
        ("2001-01-01", "2001-01-01"),
        ("~", None),
        ("", None),
        ("'3e-4'", "3e-4"),
        ("!!str 3", "3"),
        ("!!float 3", 3.0),
        ("[1, {a: null}]", [1, {"a": None}]),
        ("{1: a, true: b}", {"1": "a", "true": "b"}),
        ("{a: &x [1], b: *x}", {"a": [1], "b": [1]}),
    ],
)
def test_plain_text_is_read_as_yaml_1_2_says(text, value):
    found = read(text)

    assert (found, type(found)) == (value, type(value))


def test_not_a_number_is_read():
    assert math.isnan(read(".nan"))


@pytest.mark.parametrize(
    ("text", "key", "problem"),
    [
        ("a: 1\nb: 2\na: 3", ("a",), "is set twice, first in line 1; remove one"),
        ("x: {a: 1, a: 2}", ("x", "a"), "is set twice"),
        ("a: !!python/object/apply:os.system [ls]", ("a",), None),
        ("a: !!python/name:os.system x", ("a",), "expected a plain value"),
        ("a: !!int x", ("a",), "expected a plain value"),
        ("a: &x [*x]", ("a", 0), "contains itself by an alias"),
        ("? [1]\n: 2", (), "has a list or mapping as a key, expected text"),
    ],
)
def test_what_is_no_plain_data_is_a_problem(text, key, problem):
    data, problems = to_data(compose(text))

    if problem is None:
        assert data == {"a": ["ls"]}, "a tag on a list means nothing, and runs nothing"
        return
    assert [p.key for p in problems] == [key]
    assert problem in str(problems[0])


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(PLAIN)
def test_whatever_is_written_reads_back_equal(data):
    assert read(write(data)) == data


@pytest.mark.parametrize(
    "text", ["3e-4", "yes", "010", "1:30", "null", "~", "0x1F", "1_000", ".nan", "", " a", "#", "a: b"]
)
def test_text_that_looks_like_something_else_stays_text(text):
    assert read(write([text])) == [text]


def test_short_lists_are_written_on_one_line():
    assert write({"betas": [0.9, 0.95], "groups": [{"match": "a"}]}) == "betas: [0.9, 0.95]\ngroups:\n- match: a\n"
