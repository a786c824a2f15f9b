"""Profiles over depth: the right statistic, steps, layers and range."""

import numpy as np
import pytest

from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity
from gradwatch.render.common.depth_profile import depth_profile


def _finding(kind, *, layer, step, evidence=()):
    return Finding(
        code="GW000", kind=kind, layer=layer, step=step, severity=Severity.WARNING, message="m", evidence=evidence
    )


def test_a_vanishing_gradient_is_shown_by_the_norms_of_all_layers_at_onset_and_end():
    history = Synthetic(layers=6, steps=60).vanishing(decades=6, onset=30).history()
    found = [_finding("vanishing-gradient", layer=f"layers.{i}.weight", step=40) for i in (0, 1)]

    profile = depth_profile(found, history)

    assert (profile.statistic, profile.onset, profile.end, profile.before) == ("grad.l2", 40, 59, 40)
    assert profile.affected == (0, 1)
    norms_TL = history["grad.l2"]
    np.testing.assert_allclose(profile.onset_M, norms_TL[40])
    np.testing.assert_allclose(profile.end_M, norms_TL[59])
    low_M, high_M = profile.usual_M
    for m in range(6):
        ordered = np.sort(norms_TL[:40, m])
        assert ordered[1] <= low_M[m] <= ordered[3], "the 5th of 100"
        assert ordered[-4] <= high_M[m] <= ordered[-2]


def test_zero_nan_and_no_gradient_stay_apart():
    run = Synthetic(layers=6, steps=40).no_gradient(1).dead(2, onset=0).non_finite(step=5, layers=3)

    profile = depth_profile([_finding("no-gradient", layer="layers.1.weight", step=5)], run.history())

    assert np.isnan(profile.onset_M[1])
    assert profile.onset_M[2] == 0
    assert np.isinf(profile.onset_M[3])
    assert np.isnan(profile.usual_M[0][1]), "no step had a gradient"
    assert profile.median == np.median(profile.onset_M[[0, 4, 5]])


def test_dead_units_are_shown_by_activation_and_without_steps_before_there_is_no_range():
    history = Synthetic(layers=4, steps=40, activations=4).history()

    profile = depth_profile([_finding("dead-relu", layer="acts.2", step=0)], history)

    assert (profile.statistic, profile.layers, profile.affected) == ("act.dead_frac", history.act.layers, (2,))
    assert profile.usual_M is None


def test_an_imbalance_of_updates_is_shown_by_update_ratios():
    history = Synthetic(layers=4, steps=40).history()
    evidence = (Quantity(key="update.ratio.first", value=3.0),)

    profile = depth_profile([_finding("layer-imbalance", layer="layers.1.weight", step=12, evidence=evidence)], history)

    assert profile.statistic == "update.ratio"


@pytest.mark.parametrize(
    ("kind", "layer", "layers"),
    [("gradient-spike", "layers.0.weight", 6), ("exploding-gradient", None, 6), ("dead-layer", "layers.0.weight", 2)],
)
def test_no_profile_for_courses_over_time_whole_runs_and_few_layers(kind, layer, layers):
    assert depth_profile([_finding(kind, layer=layer, step=9)], Synthetic(layers=layers, steps=20).history()) is None
