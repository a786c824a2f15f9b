"""What of a step's time counts as training."""

import math

import pytest

from gradwatch.step_time import PAUSE_FACTOR, StepTimer


def test_steps_of_one_length_count_as_a_whole():
    timer = StepTimer()

    assert [timer.training_s(0.25) for _ in range(1000)] == [0.25] * 1000


@pytest.mark.parametrize("between", [2, 4, 50])
def test_a_pause_between_steps_counts_as_few_of_them(between):
    timer = StepTimer()

    counted = [timer.training_s(60.0 if i % between == 0 else 0.1) for i in range(4000)][2000:]

    assert max(counted) < 1.2 * PAUSE_FACTOR * 0.1
    assert min(counted) == pytest.approx(0.1)


def test_steps_that_become_longer_for_good_count_as_a_whole_after_a_while():
    timer = StepTimer()
    for _ in range(100):
        timer.training_s(0.001)

    counted = [timer.training_s(0.1) for _ in range(300)]

    assert counted[0] < 0.003
    assert counted[-1] == 0.1


def test_a_slow_first_step_lets_the_pauses_after_it_count_only_for_a_moment():
    timer = StepTimer()
    timer.training_s(30.0)  # a compilation
    for _ in range(100):
        timer.training_s(0.01)

    assert timer.training_s(30.0) < 0.05


def test_times_that_are_not_known_count_as_nothing_and_change_nothing():
    timer = StepTimer()
    timer.training_s(0.1)

    assert [timer.training_s(s) for s in (math.nan, 0.0, -1.0)] == [0.0, 0.0, 0.0]
    assert timer.training_s(0.1) == 0.1
