"""The steps that charts show, and what a point stands for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.records import Severity
from gradwatch.render.tensorboard.excerpt import MARGIN_STEPS, TableExcerpt, choose, important_steps


def test_a_run_that_fits_shows_every_step():
    assert choose(np.arange(300), [60], 1000).tolist() == list(range(300))


def test_all_steps_around_a_finding_are_shown_and_the_rest_at_equal_distances():
    steps_T = np.arange(100_000)

    chosen = steps_T[choose(steps_T, [61_803], 1000)]

    assert set(range(61_803 - MARGIN_STEPS, 61_803 + MARGIN_STEPS + 1)) <= set(chosen.tolist())
    assert (chosen[0], chosen[-1]) == (0, 99_999)
    assert np.diff(chosen).max() <= 1 + 100_000 / (1000 - 2 * MARGIN_STEPS - 3)


@given(
    st.lists(st.integers(0, 10_000), min_size=1, unique=True).map(sorted),
    st.lists(st.integers(0, 10_000)),
    st.integers(8, 60),
)
def test_there_are_at_most_so_many_points_and_the_ends_are_among_them(steps, near, most):
    chosen = choose(np.array(steps), near, most)

    assert len(chosen) <= most
    assert (np.diff(chosen) > 0).all()
    assert (chosen[0], chosen[-1]) == (0, len(steps) - 1)


def test_the_surroundings_of_the_most_severe_finding_come_first(make_finding):
    mild = make_finding("mild", layer=None, step=10, severity=Severity.WARNING, code="GW1")
    grave = make_finding("grave", layer=None, step=500, severity=Severity.CRITICAL, code="GW2")

    near = important_steps([mild, grave])

    assert near == [500, 10]
    steps_T = np.arange(2000)
    few = set(steps_T[choose(steps_T, near, 100)].tolist())
    assert set(range(480, 521)) <= few, "half of the points are for the gravest"


@pytest.fixture
def excerpt():
    """Two points, at steps 2 and 4, of one layer."""
    values = {
        "gaps": np.array([[1.0], [np.nan], [np.nan], [np.nan], [np.nan]]),
        "known": np.array([[1.0], [np.inf], [3.0], [5.0], [7.0]]),
    }
    return TableExcerpt(np.arange(5), np.array([2, 4]), ("layer",), values.__getitem__)


def test_a_point_stands_for_the_steps_since_the_one_before(excerpt):
    assert excerpt.steps_P.tolist() == [2, 4]
    assert excerpt.at("known").tolist() == [[3.0], [7.0]]
    assert excerpt.mean("known").tolist() == [[2.0], [6.0]], "of the finite values"
    assert excerpt.nonfinite_steps("known").tolist() == [1, 0]
    assert excerpt.count("known", lambda values: values > 4).tolist() == [1, 1]


def test_a_statistic_that_no_step_since_the_last_point_sampled_has_no_value(excerpt):
    assert excerpt.last_known("gaps")[0] == 1.0
    assert np.isnan(excerpt.last_known("gaps")[1])
