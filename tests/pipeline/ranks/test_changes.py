"""A divergence is dated by what some ranks did, and not by what all of them did."""

from gradwatch.events import RANK_OPTIMIZER_LOADED, RANK_STATE, RANK_WEIGHTS_CHANGED
from gradwatch.pipeline.ranks.changes import Change, find_change


def changed(*steps):
    return [RANK_WEIGHTS_CHANGED.emit(step=step, values={"parameters": 1}) for step in steps]


def test_the_first_change_of_one_rank_in_the_interval_is_found():
    known = {0: changed(4), 1: changed(4, 13, 17), 2: [*changed(4), RANK_STATE.emit(step=12)]}

    assert find_change(known, after=10, until=20) == Change(13, 1, False)
    assert find_change(known, after=3, until=10) is None, "all ranks did it"
    assert find_change(known, after=17, until=20) is None


def test_the_rank_that_alone_did_nothing_is_named():
    known = {0: [], 1: [RANK_OPTIMIZER_LOADED.emit(step=5)], 2: [RANK_OPTIMIZER_LOADED.emit(step=5)]}

    assert find_change(known, after=-1, until=10) == Change(5, 0, True)


def test_of_two_halves_none_is_named():
    known = {0: [], 1: changed(5), 2: changed(5), 3: []}

    assert find_change(known, after=-1, until=10) == Change(5, -1, False)
