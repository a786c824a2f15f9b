"""The live view."""

import copy
import dataclasses
import re
from itertools import pairwise

import pytest
from reference import newest_row

from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.render.common.layers import matrices
from gradwatch.render.common.sparkline import ASCII, UNICODE
from gradwatch.render.terminal.live_view import panel, progress


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
    assert re.match(r"loss +\d\.\d+ +[▁-█]+ +val_loss 0\.700  val_accuracy 87\.5 %", lines[1])
    assert re.match(r"gradient +0\.\d+ +[▁-█]+ +total norm  lr 0\.\d+$", lines[2])
    assert re.match(r"layers +input [▁-█]{16} output", lines[3]), "few layers are drawn broad"


def test_vanishing_is_seen_as_a_fade_towards_the_input(vanishing):
    strip = re.search(r"input (\S+) output", _panel(vanishing, width=200)).group(1)
    levels = [-1 if cell == UNICODE.zero else UNICODE.bars.index(cell) for cell in strip]

    assert len(strip) == 4 * 24, "four columns a layer where there is room"
    assert levels[0] == -1
    assert levels[-1] >= 6
    assert all(b - a >= -1 for a, b in pairwise(levels)), "noise may cost one notch"


def test_skipped_updates_and_the_loss_scale_are_reported_where_there_are_any(healthy, broken):
    assert "skipped" not in _panel(healthy)
    assert "loss scale" not in _panel(healthy)
    told = r"updates +20 updates of the last 120 skipped, newest at step 119  loss scale 0.125"
    assert re.search(told, _panel(broken, width=120))


def test_a_loss_scale_that_moved_is_reported_though_no_update_was_skipped(broken):
    history = copy.deepcopy(broken.history)
    history.truncate(60)
    scale = history.run.statistics.index("loss_scale")
    newest_row(history.run)[scale] = 2 * history.scalar("loss_scale")[0]

    text = panel(history, matrices(history.info.layers), width=120, signs=UNICODE).plain

    assert "skipped" not in text
    assert re.search(r"updates +loss scale [\d,]+, was [\d,]+", text)


def test_findings_are_counted_by_severity_and_the_newest_are_named(broken):
    lines = _panel(broken, width=120).split("\n")[-4:]

    assert re.match(r"findings +✖ 1 critical  ▲ 1 warning  • 1 info", lines[0])
    assert [re.sub(" +", " ", line.strip()) for line in lines[1:]] == [
        "✖ step 100 GW001 non-finite layers.0.weight",
        "• step 70 GW507 loss-plateau whole run",
        "▲ step 60 GW104 dead-layer layers.3.weight",
    ]


def test_layers_with_findings_are_marked_under_the_strip(broken):
    lines = _panel(broken, width=120).split("\n")
    strip = next(i for i, line in enumerate(lines) if line.startswith("layers"))
    first = lines[strip].index(UNICODE.broken)

    assert lines[strip][first : first + 4] == 4 * UNICODE.broken
    assert [(i - first) // 4 for i, sign in enumerate(lines[strip + 1]) if sign != " "] == [0, 3]
    assert [sign for sign in lines[strip + 1] if sign != " "] == ["✖", "▲"]


def test_a_dot_is_called_zero_only_where_it_is(vanishing, broken):
    assert re.search(r"· under [\d.]+e-\d+", _panel(vanishing, width=120))
    assert "· zero" in _panel(broken, width=120)


def test_the_time_in_a_name_gives_way_where_it_is_narrow():
    run = Synthetic(layers=2, steps=30)
    run.info = dataclasses.replace(run.info, name="quickstart-20261120-192758")
    history = run.history()

    assert progress(history, width=80, signs=UNICODE).plain.startswith("quickstart ")
    assert progress(history, width=200, signs=UNICODE).plain.startswith("quickstart-20261120-192758 ")


def _line(run, *, width, **info):
    run.info = dataclasses.replace(run.info, **info)
    return progress(run.history(), width=width, signs=UNICODE).plain


@pytest.mark.parametrize(
    ("steps", "total", "shown"),
    [(20, 60, "epoch 2/4  "), (16, 60, "epoch 1/4  "), (60, 60, "epoch 4/4  "), (20, None, "epoch 2  step 20 ")],
    ids=["in the second", "the last step of the first", "the last is short", "of unknown length"],
)
def test_the_epoch_is_counted_from_one(steps, total, shown):
    line = _line(Synthetic(layers=2, steps=steps), width=100, steps_per_epoch=16, total_steps=total)

    assert shown in line


def test_a_run_beyond_its_planned_steps_has_no_time_left():
    line = _line(Synthetic(layers=2, steps=30), width=100, total_steps=20)

    assert "  0.0 s left" in line


def test_a_long_name_leaves_the_bar_its_room():
    for name in ("a-name-without-any-date-that-is-much-too-long", "n" * 200):
        line = _line(Synthetic(layers=2, steps=30), width=80, name=name, steps_per_epoch=10, total_steps=60)

        assert len(line) == 80
        assert len(re.search(r"epoch 3/6  (\S+) 30/60", line).group(1)) >= 12


def test_findings_of_a_kind_share_a_line(vanishing):
    lines = [line for line in _panel(vanishing, width=120).split("\n") if "GW101" in line]
    others = sum(f.kind == "vanishing-gradient" for f in vanishing.history.findings) - 1

    assert len(lines) == 1
    assert lines[0].endswith(f" and {others} more")


def test_the_numbers_stay_in_place_while_the_trend_grows(healthy):
    history = copy.deepcopy(healthy.history)
    late = _panel(healthy).split("\n")[2].index("total norm")

    history.truncate(3)

    early = panel(history, (), width=80, signs=UNICODE).plain.split("\n")[2]
    assert early.index("total norm") == late


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


def test_clipping_is_reported_where_it_happens():
    history = Synthetic(layers=2, steps=30).history()
    newest_row(history.run)[history.run.statistics.index("grad_norm.after_clip")] = 0.05

    assert "clipped to 0.0500" in panel(history, matrices(history.info.layers), width=80, signs=UNICODE).plain


def test_one_spike_of_the_loss_does_not_flatten_the_rest():
    made = Synthetic(layers=2, steps=60)
    made.loss_T[40] = 100 * made.loss_T.max()

    loss = panel(made.history(), (), width=120, signs=UNICODE).plain.split("\n")[1]

    (bars,) = re.findall(r"[▁-█]{12,}", loss)
    assert bars.count("█") == 1
    assert len(set(bars)) > 2, "on a linear scale, all other steps are at the lowest level"
