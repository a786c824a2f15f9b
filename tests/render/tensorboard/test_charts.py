"""What the charts of TensorBoard hold."""

import copy
import re
from dataclasses import replace

import numpy as np
import pytest
from reference import newest_row

from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Severity
from gradwatch.render.common.layers import matrices
from gradwatch.render.tensorboard import charts
from gradwatch.render.tensorboard.dashboard import layout
from gradwatch.render.tensorboard.excerpt import HistoryExcerpt
from gradwatch.render.tensorboard.histograms import magnitudes
from gradwatch.render.tensorboard.protobuf import Margin


def _points(run_or_history, rows=10):
    """Return the values of the charts of the run at the newest step, if the last point is some rows before it."""
    history = getattr(run_or_history, "history", run_or_history)
    newest = HistoryExcerpt.newest(history, after=history.step - rows)
    return _drawn(*charts.run_blocks(history, matrices(history.info.layers), newest))


def _layer_points(history, seen=None):
    newest = HistoryExcerpt.newest(history, after=history.step - 50)
    return _drawn(*charts.layer_blocks(newest, set() if seen is None else seen))


def _drawn(*blocks):
    return {tag: value for block in blocks for _, values in charts.points_of(block) for tag, value in values.items()}


def test_points_are_the_newest_values_of_the_history(healthy):
    points, history = _points(healthy), healthy.history

    assert points["curves/loss"] == history["loss"][-1]
    assert points["curves/total_norm"] == history["grad_norm.before_clip"][-1]
    assert points["curves/lr"] == 1e-3
    assert points["speed/peak_memory_GiB"] == pytest.approx(1e9 / 2**30)


def test_speed_is_the_mean_since_the_last_point(healthy):
    assert _points(healthy, rows=7)["speed/step_ms"] == pytest.approx(healthy.history["step_ms"][-7:].mean())


def test_numbers_that_are_not_finite_are_left_out_of_most_charts_and_counted(broken, healthy):
    points = _points(broken)

    assert {tag for tag, value in points.items() if not np.isfinite(value)} == {"curves/loss", "curves/total_norm"}
    assert points["nonfinite/layers"] == 1
    assert points["nonfinite/steps"] == 10
    assert _points(healthy)["nonfinite/layers"] == _points(healthy)["nonfinite/steps"] == 0


def test_a_nan_between_two_points_is_counted_though_the_newest_step_is_fine():
    history = Synthetic(layers=3, steps=50).non_finite(step=43, layers=[0, 2]).history()

    assert _points(history, rows=10)["nonfinite/layers"] == 2
    assert _points(history, rows=10)["nonfinite/steps"] == 1
    assert _points(history, rows=5)["nonfinite/layers"] == 0


def test_gradient_flow_is_told_by_thirds_of_the_depth(vanishing, healthy):
    flow = [_points(vanishing)[f"gradients/log10_norm_{third}"] for third in ("early", "middle", "late")]
    level = [_points(healthy)[f"gradients/log10_norm_{third}"] for third in ("early", "middle", "late")]

    assert np.diff(flow) == pytest.approx([3.1, 3.1], abs=0.6), "9 decades over the whole depth"
    assert np.ptp(level) < 1


def test_update_ratios_stand_between_the_lines_of_the_healthy_band(healthy):
    points = _points(healthy)

    slow, middle, fast = (points[f"updates/log10_ratio_{which}"] for which in ("slowest", "median", "fastest"))
    assert points["updates/healthy_from"] < slow <= middle <= fast < points["updates/healthy_to"]


def test_the_loss_scale_is_charted_only_where_there_is_one(healthy, broken):
    assert not any(tag.startswith("optim/loss_scale") for tag in _points(healthy))
    assert _points(broken)["optim/loss_scale"] == 65536 * 0.5**19
    assert _points(broken, rows=40)["optim/skipped_frac"] == 0.5


def test_clipping_has_a_chart_only_where_something_is_clipped():
    history = Synthetic(layers=3, steps=20).history()
    assert "curves/total_norm_after_clip" not in _points(history)

    newest_row(history.run)[history.run.statistics.index("grad_norm.after_clip")] = 0.01
    assert _points(history)["curves/total_norm_after_clip"] == 0.01


def test_each_optimizer_group_has_its_learning_rate():
    source = Synthetic(layers=3, steps=1).history()
    history = type(source)(source.info, groups=2)
    history.append(0, run={"loss": 1.0, "lr.0": 0.1, "lr.1": 0.2}, param_SL=newest_row(source.param))

    points = _points(history, rows=1)

    assert (points["curves/lr_group_0"], points["curves/lr_group_1"]) == (0.1, 0.2)


def test_validations_keep_their_own_steps():
    run = Synthetic(layers=1, steps=120)
    run.val_loss_T[[39, 79, 119]], run.val_accuracy_T[79] = (1.0, 0.9, 0.8), 0.78

    after = charts.points_of(charts.validation_block(run.history(), after=39))

    assert after == [
        (79, {"curves/loss_validation": 0.9, "curves/validation_accuracy": 0.78}),
        (119, {"curves/loss_validation": 0.8}),
    ]


def test_no_validation_is_lost_however_long_nothing_was_written():
    run = Synthetic(layers=1, steps=900)
    run.val_loss_T[[10, 500, 899]] = 0.5

    found = charts.validation_block(run.history(), after=-1)

    assert found.steps_P.tolist() == [10, 500, 899]


def test_a_chart_of_many_validations_has_its_first_and_last(healthy):
    run = Synthetic(layers=1, steps=900)
    run.val_loss_T[::10] = 0.5

    found = charts.validation_block(run.history(), after=-1, most=30).steps_P

    assert len(found) == 30
    assert (found[0], found[-1]) == (0, 890)


def test_every_layer_has_its_charts(vanishing):
    points = _layer_points(vanishing.history)

    for i in range(24):
        assert f"per_layer_grad_norm/layers.{i}.weight" in points
        assert f"per_layer_update_ratio/layers.{i}.weight" in points, "though step 119 is not sampled"
    assert points["per_layer_saturated_frac/acts.0"] == pytest.approx(0.95)
    assert not any(tag.startswith("per_layer_zero_frac") for tag in points), "nothing to see where all is 0"


def test_a_zero_fraction_is_charted_from_its_first_zero_on():
    run = Synthetic(layers=2, steps=30)
    run.zero_frac_TL[10:20, 1] = 0.25
    seen: set[str] = set()
    tags = []

    for history in run.replay():
        if history.step in (5, 15, 25):
            tags.append([t for t in _layer_points(history, seen) if t.startswith("per_layer_zero")])

    assert tags == [[], ["per_layer_zero_frac/layers.1.weight"], ["per_layer_zero_frac/layers.1.weight"]]


def test_a_missing_gradient_has_no_point(broken):
    points = _layer_points(broken.history)

    assert "per_layer_grad_norm/layers.2.weight" not in points, "it has none"
    assert "per_layer_grad_norm/layers.0.weight" not in points, "it is NaN"
    assert points["per_layer_grad_norm/layers.3.weight"] == 0, "zero is a number"


def _all_points(run):
    points = _points(run) | _layer_points(run.history)
    validations = charts.validation_block(run.history, after=-1)
    return points | _drawn(*([validations] if validations else []), *charts.problem_marks(run.history).values())


@pytest.mark.parametrize("name", ["healthy", "broken"])
def test_every_chart_is_described(request, name):
    for tag in _all_points(request.getfixturevalue(name)):
        assert charts.DESCRIPTIONS.get(tag) or charts.DESCRIPTIONS.get(tag.split("/")[0]), tag


def test_every_chart_of_the_dashboard_has_something_to_draw(healthy, broken):
    tags = {*_all_points(healthy), *_all_points(broken)}

    for category, drawn in layout(broken.history.info).items():
        for title, patterns in drawn.items():
            assert any(re.match(pattern, tag) for pattern in patterns for tag in tags), f"{category}: {title}"
            if isinstance(patterns, Margin):
                assert set(patterns) <= tags, "a band needs all three"


def test_loss_learning_rate_and_norm_are_the_first_charts_and_the_picture_opens_next(healthy, broken):
    tags = {*_points(healthy), *_points(broken), *_layer_points(healthy.history), charts.PICTURE}
    tags |= set(charts.METRICS)

    assert sorted(tags)[:4] == ["curves/loss", "curves/loss_validation", "curves/lr", "curves/total_norm"]
    assert sorted({tag.split("/")[0] for tag in tags})[:2] == ["curves", "gradients"]


def test_histograms_are_of_the_power_of_two_of_the_size_in_powers_of_ten():
    edges = np.array([-4.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 4.0])
    counts = np.array([[1, 3, 0, 50, 0, 4, 2]])

    (buckets,) = magnitudes(edges, counts)

    octave = np.log10(2)
    assert buckets == pytest.approx(np.array([[0, octave, 7], [octave, 2 * octave, 3]])), "either sign, not zero"


def test_fine_bins_are_put_together_and_lose_no_count():
    side = 2.0 ** (np.arange(-160, 65) / 4)
    edges = np.concatenate([-side[::-1], side])
    counts = np.random.default_rng(0).integers(0, 9, (3, len(edges) - 1))
    around_zero = counts[:, len(side) - 1].copy()

    histograms = magnitudes(edges, counts)

    for buckets, count, zero in zip(histograms, counts, around_zero, strict=True):
        assert len(buckets) == 56, "one per octave"
        assert buckets[:, 1] - buckets[:, 0] == pytest.approx(np.log10(2))
        assert buckets[1:, 0] == pytest.approx(buckets[:-1, 1]), "without gaps"
        assert buckets[:, 2].sum() == count.sum() - zero


def test_the_outermost_bin_of_a_histogram_does_not_stretch_its_axis():
    edges = np.array([-3.4e38, -65536.0, -1e-12, 1e-12, 65536.0, 3.4e38])

    (buckets,) = magnitudes(edges, np.array([[0, 0, 5, 0, 2]]))

    assert buckets == pytest.approx(np.array([[np.log10(65536), np.log10(2 * 65536), 2]]))


def test_a_histogram_without_a_count_is_empty():
    edges = np.array([-np.inf, -1.0, 0.0, 1.0, np.inf])

    assert [h.shape for h in magnitudes(edges, np.array([[9, 0, 5, 9], [0, 0, 0, 0]]))] == [(0, 3), (0, 3)]


def test_a_loss_that_is_no_number_is_a_point_that_tensorboard_marks(broken):
    history = copy.deepcopy(broken.history)
    history.truncate(105)

    assert np.isnan(_points(history)["curves/loss"])
    history.truncate(90)
    assert np.isfinite(_points(history)["curves/loss"])


def test_a_problem_is_marked_at_its_onset_at_the_height_of_the_loss(healthy, make_finding):
    history = copy.deepcopy(healthy.history)
    for onset, step, severity in ((70, 80, Severity.WARNING), (40, 90, Severity.CRITICAL), (10, 15, Severity.INFO)):
        found = make_finding("any", layer=f"layers.{onset}", step=step, severity=severity, code="GW1")
        history.report(replace(found, onset=onset))

    ((tag, mark),) = charts.problem_marks(history).items()

    assert tag == "problems/any"
    assert mark.steps_P.tolist() == [40], "the first onset above info"
    assert mark.values[tag] == history["loss"][40]


def test_problems_are_counted_from_their_onset_to_their_end(healthy, make_finding):
    history = copy.deepcopy(healthy.history)
    found = make_finding("any", layer="layers.1", step=60, severity=Severity.WARNING, code="GW1")
    history.report(replace(found, onset=50))
    history.withdraw(replace(found, onset=50, withdrawn=90, ended=85, reason="it is over"))

    (block, *_) = charts.run_blocks(history, (), HistoryExcerpt.over_run(history, most=1000))

    present = block.values["problems/present"]
    assert np.flatnonzero(present).tolist() == list(range(50, 85))
    assert present.max() == 1


def test_broken_steps_are_counted_up_to_a_step(broken):
    assert charts.nonfinite_steps(broken.history, until=99) == 0
    assert charts.nonfinite_steps(broken.history, until=104) == 5
