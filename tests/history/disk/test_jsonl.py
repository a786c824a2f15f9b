"""Findings and events on disk: a line each, exact, robust against a kill."""

import json
import math

import pytest

from gradwatch.history.disk.events import EVENTS
from gradwatch.history.disk.findings import FINDINGS
from gradwatch.records import Event


def event(step, value):
    return Event(kind="rewind", step=step, layer="l0", text="back to step 3", values={"size": value})


@pytest.fixture(params=[EVENTS, FINDINGS], ids=lambda lines: lines.noun)
def lines(request):
    return request.param


@pytest.fixture
def item(lines, finding):
    """Return a function that makes an event or a finding of a step, with a value."""
    make = event if lines is EVENTS else lambda step, value: finding(step, layer=f"l{step}", value=value)
    return lambda step, value=0.0: make(step, value)


def write(lines, directory, *parts):
    (directory / lines.name).write_bytes(b"".join(parts))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e-300, 0.1])
def test_a_value_survives_whatever_it_is_in_plain_json(tmp_path, lines, item, value):
    line = lines.line(item(5, value), at=5)
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    write(lines, tmp_path, line)

    ((back,), problems) = lines.read(tmp_path)
    assert repr(back) == repr(item(5, value))
    assert problems == []


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path, lines, item):
    write(lines, tmp_path, lines.line(item(5), at=5), lines.line(item(9), at=9)[:-20])

    assert lines.read(tmp_path) == ([item(5)], [])


def test_a_damaged_line_is_named_and_the_rest_read(tmp_path, lines, item):
    write(lines, tmp_path, lines.line(item(1), at=1), b'{"at": 2, "kind"\n', lines.line(item(3), at=3))

    found, problems = lines.read(tmp_path)
    assert found == [item(1), item(3)]
    assert len(problems) == 1
    assert f"{lines.name}, line 2 is not a valid {lines.noun}" in problems[0]


def test_truncate_forgets_later_items_and_those_that_were_written_later(tmp_path, lines, item):
    write(lines, tmp_path, lines.line(item(5), at=4), lines.line(item(6), at=90), lines.line(item(51), at=50))

    lines.truncate(tmp_path, until=50)
    assert lines.read(tmp_path) == ([item(5)], [])


def test_a_run_without_a_file_has_no_items(tmp_path, lines):
    lines.truncate(tmp_path, until=3)
    assert lines.read(tmp_path) == ([], [])
