"""A norm far above its past is a spike, unless the run has had others that were nearly as far above theirs."""

import numpy as np
import pytest

from gradwatch.detect.features.sequential_test import ALPHA, SequentialTest
from gradwatch.detect.gradients.gradient_spike import (
    PAST_STEPS,
    TAIL_INDEX,
    GradientSpike,
    least_by_second_largest,
    norms_by_median,
)
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.history.table import WINDOW


def steps_of_spikes(*spikes, replay, steps=420):
    made = Synthetic(steps=steps)
    for step, factor in spikes:
        made.spike(step=step, factor=factor)
    return [finding.onset for finding in replay(made.history(), [GradientSpike()])]


@pytest.mark.parametrize("step", [60, 400])
def test_a_single_spike_is_found_early_and_late(step, replay):
    assert steps_of_spikes((step, 200), replay=replay) == [step]


def test_norms_that_come_again_and_again_are_usual_for_the_run(replay):
    # 60 steps apart, so the window before each of them holds none of the others
    assert steps_of_spikes((100, 15), (160, 15), (220, 200), replay=replay) == []


def test_a_spike_far_above_the_others_is_news(replay):
    assert steps_of_spikes((100, 15), (160, 15), (220, 2000), replay=replay) == [220]


def test_long_runs_of_heavy_tails_have_no_more_spikes_than_the_budget_allows():
    runs, steps, factor = 200, 5000, GradientSpike().factor
    rng = np.random.default_rng(0)
    far = alarms = 0
    for _ in range(runs):
        ratio_T = norms_by_median(rng.pareto(TAIL_INDEX, steps) + 1)
        candidates = [t for t in np.flatnonzero(ratio_T >= factor).tolist() if t > 1]
        bounds = [least_by_second_largest((PAST_STEPS + t) // WINDOW + 1) for t in candidates]
        second = [np.sort(ratio_T[:t])[-2] for t in candidates]
        far += bool(candidates)
        alarms += any(ratio_T[t] >= bound * s for t, bound, s in zip(candidates, bounds, second, strict=True))

    share = ALPHA / len(SequentialTest)
    assert far > 0.3 * runs, "the factor alone reports many of these runs"
    assert alarms <= runs * share + 3 * np.sqrt(runs * share)
