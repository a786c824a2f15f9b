"""What a table promises: a full window of the newest steps, all that is kept of the older ones."""

from functools import partial

import numpy as np
import pytest
from reference import newest_row

from gradwatch.history import table as history_table
from gradwatch.history import thinning
from gradwatch.history.table import MAX_APPENDED_STEPS, MIN_SLACK_STEPS, WINDOW, Table

LENGTH = 64


def table(findings=()):
    def keep(steps_T):
        return thinning.is_kept(steps_T, newest=int(steps_T[-1]), length=LENGTH, findings=findings)

    return Table(["a", "b"], ["x", "y"], dtype="<f4", segment_length=LENGTH, keep=keep)


def row(step):
    return np.array([[step, -step], [step + 0.5, -step - 0.5]], np.float32)


def filled(steps, **kwargs):
    t = table(**kwargs)
    for step in range(steps):
        t.append(np.array([step]), row(step)[None])
    return t


def test_window_holds_the_newest_steps_oldest_first():
    t = filled(1000)

    assert t.window("x", 3).tolist() == [[997, -997], [998, -998], [999, -999]]
    assert t.steps(3).tolist() == [997, 998, 999]
    assert t.newest("y").tolist() == [999.5, -999.5]
    assert np.array_equal(newest_row(t), row(999))


@pytest.mark.parametrize("steps", [1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 1, 3 * WINDOW, 1237])
def test_window_is_never_thinned(steps):
    t = filled(steps)
    expected = np.arange(max(0, steps - WINDOW), steps)

    assert np.array_equal(t.steps(), expected)
    assert np.array_equal(t.window("x")[:, 0], expected)


@pytest.mark.parametrize("most", [1, 7, MIN_SLACK_STEPS, MIN_SLACK_STEPS + 1, 100, WINDOW, MAX_APPENDED_STEPS])
def test_a_table_of_wide_rows_has_little_room_to_slide_in_and_holds_the_same(most, monkeypatch):
    usual = filled(1500)
    monkeypatch.setattr(history_table, "MAX_SLACK_BYTES", 1)
    narrow, first, counts = table(), 0, np.random.default_rng(0)
    empty = narrow._values_TSL.nbytes
    while first < 1500:
        steps = np.arange(first, min(first + int(counts.integers(1, most + 1)), 1500))
        narrow.append(steps, np.stack([row(step) for step in steps]))
        first += len(steps)

    assert empty < 0.6 * usual._values_TSL.nbytes
    assert narrow._values_TSL.nbytes <= max(
        empty, (WINDOW + most) / (WINDOW + MAX_APPENDED_STEPS) * usual._values_TSL.nbytes
    )
    assert np.array_equal(narrow.window("x"), usual.window("x"))
    for mine, other in zip(narrow.rows(), usual.rows(), strict=True):
        assert np.array_equal(mine, other)


@pytest.mark.parametrize("steps", [1, 300, 700, 5000])
@pytest.mark.parametrize("findings", [(), (130, 2000)])
def test_series_is_what_the_rule_keeps_with_its_own_values(steps, findings):
    t = filled(steps, findings=findings)
    all_T = np.arange(steps)
    expected_T = all_T[thinning.is_kept(all_T, newest=steps - 1, length=LENGTH, findings=findings)]

    steps_T, values_TL = t.series("y")
    assert np.array_equal(steps_T, expected_T)
    assert np.array_equal(values_TL[:, 0], (expected_T + 0.5).astype(np.float32)), "values of other steps"
    assert np.array_equal(t.rows()[1][:, 1, 0], values_TL[:, 0])
    assert len(t) == len(expected_T)


def test_memory_is_bounded_not_only_what_is_shown():
    t = filled(20_000)
    here = len(t.rows(thin=False)[0])
    assert here <= len(t) + 2 * WINDOW + 8 * LENGTH, f"{here} rows in memory, {len(t)} are kept"


def test_table_rejects_a_step_that_does_not_grow():
    t = filled(5)
    with pytest.raises(ValueError, match="step 4 does not follow step 4"):
        t.append(np.array([4]), row(4)[None])


def test_table_rejects_values_that_would_be_broadcast():
    with pytest.raises(ValueError, match=r"shape \(2, 1\), expected \(2, 2\)"):
        table().append(np.array([0]), row(0)[None, :, :1])


def test_an_empty_table_has_empty_answers():
    t = table()
    assert (len(t), t.last_step) == (0, -1)
    assert t.window("x").shape == (0, 2)
    assert t.series("x")[1].shape == (0, 2)
    assert t.rows()[1].shape == (0, 2, 2)


def test_extend_equals_appending():
    one = filled(1500)
    two = table()
    two.fill(*one.rows())
    for t in (one, two):
        for step in range(1500, 2200):
            t.append(np.array([step]), row(step)[None])

    assert np.array_equal(one.rows()[0], two.rows()[0])
    assert np.array_equal(one.rows()[1], two.rows()[1])


def test_steps_with_gaps_are_thinned_alike():
    sampled = range(0, 30_000, 10)
    t = table()
    for step in sampled:
        t.append(np.array([step]), row(step)[None])
    all_T = np.array(sampled)

    assert np.array_equal(t.kept_steps(), all_T[thinning.is_kept(all_T, newest=29_990, length=LENGTH)])


def test_truncate_forgets_what_came_after():
    t = filled(900)
    t.truncate(700)
    assert t.last_step == 700
    assert t.newest("x")[0] == 700
    t.append(np.array([701]), row(701)[None])
    assert t.steps(2).tolist() == [700, 701]


def test_truncate_before_the_first_step_empties():
    t = filled(10)
    t.truncate(-1)
    assert (len(t), t.last_step) == (0, -1)
    t.append(np.array([0]), row(0)[None])
    assert len(t) == 1


def test_restore_gives_back_the_full_window_that_thinning_took():
    live = filled(1000)
    state = live.state()
    thinned = table()
    steps_T, values_TSL = filled(3000).rows()
    thinned.fill(steps_T[steps_T < 1000], values_TSL[steps_T < 1000])
    assert len(thinned.steps()) < WINDOW, "the test needs a window with gaps"

    thinned.restore(state)
    assert np.array_equal(thinned.steps(), live.steps())
    assert np.array_equal(thinned.window("y"), live.window("y"))


def test_state_is_a_copy():
    t = filled(300)
    state = t.state()
    before = state["values"].copy()
    for step in range(300, 900):
        t.append(np.array([step]), row(step)[None])
    assert np.array_equal(state["values"], before)


def test_segment_gives_old_and_recent_rows_of_one_segment():
    t = filled(2 * WINDOW + 10)
    boundary = WINDOW // LENGTH  # its rows were archived; those of the last one are recent
    for index in (0, boundary, (2 * WINDOW) // LENGTH):
        steps_T, values_TSL = t.segment(index)
        assert set(steps_T // LENGTH) == {index}
        assert np.array_equal(values_TSL[:, 0, 0], steps_T.astype(np.float32))


def test_windows_longer_than_what_is_kept_are_refused():
    read = partial(filled(3).window, "x")
    with pytest.raises(AssertionError, match="at most 256"):
        read(WINDOW + 1)
