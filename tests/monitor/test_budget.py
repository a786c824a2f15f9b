"""The budget: it settles where the cost is within its fraction, comes back when there is room, and looks closer."""

from itertools import pairwise

import pytest

from gradwatch.monitor.budget import CLOSE_WATCH_STEPS, MAX_FACTOR, SETTLING_STEPS, Budget, Schedule


def spend(budget, steps, *, fixed_s, optional_s, wall_s, first=0):
    """Make steps whose optional part costs `optional_s` on the steps at which it is due."""
    measured = []
    for step in range(first, first + steps):
        optional = optional_s if budget.is_due(budget.schedule.updates, step) else 0.0
        if optional:
            measured.append(step)
        budget.charge(wall_s, watch_s=fixed_s + optional, optional_s=optional)
        budget.review(step)
    return measured


def test_what_is_cheap_is_measured_as_scheduled():
    budget = Budget(Schedule(updates=10))

    measured = spend(budget, 2000, fixed_s=1e-3, optional_s=1e-3, wall_s=0.1)

    assert measured == list(range(0, 2000, 10))
    assert budget.factor == 1


def test_it_settles_on_the_most_frequent_measurement_that_keeps_to_the_fraction():
    budget = Budget(Schedule(updates=10, budget=0.02))

    spend(budget, 4000, fixed_s=1e-3, optional_s=0.03, wall_s=0.1)

    # of the 2 ms that a step of 100 ms has, 1 ms is left for 3 ms a step at factor 1
    assert budget.factor == 4


def test_the_first_steps_are_measured_as_scheduled_whatever_they_cost():
    budget = Budget(Schedule(updates=10))

    measured = spend(budget, 1000, fixed_s=1.0, optional_s=1.0, wall_s=1.0)

    assert [step for step in measured if step < SETTLING_STEPS] == list(range(0, SETTLING_STEPS, 10))
    assert len(measured) < SETTLING_STEPS / 10 + (1000 - SETTLING_STEPS) / 80 + 2


def test_it_thins_by_so_much_that_no_third_of_a_run_goes_unseen():
    budget = Budget(Schedule(updates=10))

    measured = spend(budget, 6000, fixed_s=1.0, optional_s=1.0, wall_s=1.0)

    gaps = [(later - step, step) for step, later in pairwise(measured)]
    assert all(gap <= max(10, step / 3 + 10) for gap, step in gaps)
    assert gaps[-1][0] == 10 * MAX_FACTOR


def test_it_never_measures_more_seldom_than_its_bound():
    budget = Budget(Schedule(updates=10))

    spend(budget, 5000, fixed_s=1.0, optional_s=1.0, wall_s=1.0)

    assert budget.factor == MAX_FACTOR
    assert budget.is_due(10, 10 * MAX_FACTOR * 7)


def test_it_comes_back_when_steps_grow_long():
    budget = Budget(Schedule(updates=10))
    spend(budget, 3000, fixed_s=1e-4, optional_s=1e-3, wall_s=1e-3)
    assert budget.factor > 1

    spend(budget, 4000, fixed_s=1e-4, optional_s=1e-3, wall_s=1.0, first=3000)

    assert budget.factor == 1


def test_without_a_budget_the_schedule_is_kept_at_any_cost():
    budget = Budget(Schedule(updates=10, budget=0.0))

    measured = spend(budget, 2000, fixed_s=1.0, optional_s=1.0, wall_s=1.0)

    assert measured == list(range(0, 2000, 10))


def test_after_a_finding_it_looks_as_often_as_scheduled_for_a_while():
    budget = Budget(Schedule(updates=10))
    spend(budget, 3000, fixed_s=1.0, optional_s=1.0, wall_s=1.0)

    budget.watch_closely(3000)

    due = [step for step in range(3000, 3000 + 2 * CLOSE_WATCH_STEPS) if budget.is_due(10, step)]
    assert [step for step in due if step < 3000 + CLOSE_WATCH_STEPS] == list(range(3000, 3000 + CLOSE_WATCH_STEPS, 10))
    assert len(due) <= CLOSE_WATCH_STEPS / 10 + 2


@pytest.mark.parametrize(("budget", "histograms", "expected"), [(0.02, 200, [410]), (0.02, 0, []), (0.0, 200, [])])
def test_a_finding_has_all_histograms_at_the_next_sampled_step(budget, histograms, expected):
    watched = Budget(Schedule(histograms=histograms, budget=budget))

    watched.watch_closely(402)

    assert [step for step in range(401, 600) if watched.due(step).histograms == (0, 1)] == expected


@pytest.mark.parametrize(
    ("schedule", "every", "turns"),
    [
        (Schedule(), 10, 20),
        (Schedule(updates=0, activations=25, histograms=100), 25, 4),
        (Schedule(updates=4, activations=10, histograms=30), 4, 7),
        (Schedule(updates=10, activations=10, histograms=10), 10, 1),
        (Schedule(updates=10, activations=10, histograms=3), 3, 1),
        (Schedule(updates=1, activations=1, histograms=3), 1, 3),
        (Schedule(updates=1, activations=0, histograms=200), 10, 20),
        (Schedule(updates=10, activations=10, histograms=1000), 50, 20),
        (Schedule(updates=0, activations=0, histograms=200), 10, 20),
        (Schedule(updates=0, activations=0, histograms=7), 1, 7),
    ],
)
def test_histograms_take_turns_over_the_sampled_steps(schedule, every, turns):
    budget = Budget(schedule)
    due = {step: budget.due(step).histograms for step in range(1 + 2 * every * turns)}

    assert due.pop(0) == (0, 1), "the first step has all"
    assert [step for step, turn in due.items() if turn] == list(range(every, 1 + 2 * every * turns, every))
    assert {turn.of for turn in due.values() if turn} == {turns}
    shown = [turn.number for turn in due.values() if turn]
    assert sorted(shown[:turns]) == sorted(shown[turns:]) == list(range(turns)), "each once, before any comes again"


def test_histograms_that_are_thinned_leave_no_parameter_out():
    budget = Budget(Schedule())
    spend(budget, 3000, fixed_s=1.0, optional_s=1.0, wall_s=1.0)
    assert budget.factor == MAX_FACTOR

    later = [turn for step in range(3000, 3000 + MAX_FACTOR * 200) if (turn := budget.due(step).histograms)]

    assert sorted(turn.number for turn in later) == list(range(20))


def test_histograms_leave_no_parameter_out_while_they_come_ever_more_seldom():
    budget = Budget(Schedule())
    shown = []
    for step in range(1000):
        if turn := budget.due(step).histograms:
            shown.append(turn)
        budget.charge(1.0, watch_s=2.0, optional_s=1.0)
        budget.review(step)

    assert budget.factor == MAX_FACTOR
    assert [turn.number for turn in shown if turn.of > 1] == [i % 20 for i in range(len(shown) - 1)]


def test_without_histograms_none_is_due_at_any_step():
    budget = Budget(Schedule(histograms=0))

    assert not any(budget.due(step).histograms for step in range(500))


@pytest.mark.parametrize("step", [0, 7, 200])
def test_what_is_scheduled_never_is_never_due(step):
    assert not Budget(Schedule(updates=0)).is_due(0, step)


def test_time_between_stretches_of_training_gives_no_allowance():
    budget, paused = Budget(Schedule(updates=1)), Budget(Schedule(updates=1))

    spend(budget, 2000, fixed_s=1e-3, optional_s=3e-3, wall_s=0.1)
    for first in range(0, 2000, 10):
        spend(paused, 9, fixed_s=1e-3, optional_s=3e-3, wall_s=0.1, first=first)
        spend(paused, 1, fixed_s=1e-3, optional_s=3e-3, wall_s=60.0, first=first + 9)

    assert budget.factor > 1
    assert paused.factor == budget.factor
