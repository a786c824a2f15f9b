"""A norm far above its past is a spike, unless the run has had others that were nearly as far above theirs."""

import pytest

from gradwatch.detect.gradients.gradient_spike import GradientSpike
from gradwatch.history.synthetic.builder import Synthetic


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
