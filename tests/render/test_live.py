"""The live view."""

import re
from itertools import pairwise

import pytest

from gradwatch.history.synthetic import Synthetic
from gradwatch.render._layers import matrices
from gradwatch.render._live import panel, progress
from gradwatch.render._trend import ASCII, UNICODE


def _panel(run, *, width=80, signs=UNICODE):
    return panel(run.history, matrices(run.history.info.layers), width=width, signs=signs).plain


@pytest.mark.parametrize("width", [30, 80, 200])
@pytest.mark.parametrize("name", ["healthy", "vanishing", "broken"])
def test_no_line_is_wider_than_the_terminal(request, name, width):
    lines = _panel(request.getfixturevalue(name), width=width).split("\n")

    assert max(map(len, lines)) <= width


def test_a_healthy_run_shows_where_it_stands_and_no_more(healthy):
    lines = _panel(healthy).split("\n")

    assert len(lines) == 4
    assert re.search(r"quick .*120/120  100 %  0.0 s left  6,\d{3} samples/s", lines[0])
    assert re.match(r"loss +\d\.\d+ +[▁-█]+ +validation 0\.7, 87\.5 %", lines[1])
    assert re.match(r"gradient +0\.\d+ +[▁-█]+ +total norm", lines[2])
    assert re.match(r"layers +input [▁-█]{4} output", lines[3])


def test_vanishing_is_seen_as_a_fade_towards_the_input(vanishing):
    strip = re.search(r"input (\S+) output", _panel(vanishing, width=200)).group(1)
    levels = [-1 if cell == UNICODE.zero else UNICODE.bars.index(cell) for cell in strip]

    assert len(strip) == 24
    assert levels[0] == -1
    assert levels[-1] >= 6
    assert all(b - a >= -1 for a, b in pairwise(levels)), "noise may cost one notch"


def test_the_layers_that_matter_are_named(vanishing, broken):
    assert re.search(r"layers\.[01] +gradient [\d,]+x below the median layer, \d+ more", _panel(vanishing))
    assert re.search(r"layers\.23 +gradient [\d,]+x above the median layer, \d+ more", _panel(vanishing))
    text = _panel(broken)
    assert re.search(r"extreme +layers\.0 +NaN or Inf", text)
    assert re.search(r"layers\.3 +zero gradient", text)
    assert re.search(r"layers\.2 +no gradient", text)


def test_skipped_updates_and_the_loss_scale_are_told_where_there_are_any(healthy, broken):
    assert "skipped" not in _panel(healthy)
    assert "20 updates of the last 120, newest at step 119  loss scale 0.125" in _panel(broken)


def test_findings_are_counted_by_severity_and_the_gravest_is_named(broken):
    last = _panel(broken, width=120).split("\n")[-1]

    assert "✖ 1 critical" in last
    assert "▲ 1 warning" in last
    assert "• 1 info" in last
    assert last.endswith("non-finite in layers.0.weight, step 100")


def test_broken_numbers_are_drawn_as_broken(broken):
    loss = _panel(broken).split("\n")[1]

    assert re.match(r"loss +NaN ", loss)
    assert UNICODE.broken in loss


def test_a_terminal_without_unicode_gets_plain_ascii(vanishing, broken):
    for run in (vanishing, broken):
        assert _panel(run, signs=ASCII).isascii()


def test_a_run_of_unknown_length_shows_its_step_without_a_bar():
    run = Synthetic(layers=2, steps=30)
    run.info = type(run.info)(**{f: getattr(run.info, f) for f in run.info.__slots__} | {"total_steps": None})

    text = progress(run.history(), width=80, signs=UNICODE).plain

    assert re.fullmatch(r"synthetic  step 30  6,\d{3} samples/s", text)


def test_clipping_is_told_where_it_happens():
    history = Synthetic(layers=2, steps=30).history()
    history.run.newest_row()[history.run.statistics.index("grad_norm.after_clip")] = 0.05

    assert "clipped to 0.0500" in panel(history, matrices(history.info.layers), width=80, signs=UNICODE).plain
