"""Helpers of the tests of the fast path: which steps take it, and that its rows are those of the full path."""

import numpy as np

from gradwatch.monitor.fast_path import FastPath


def steps_of(monkeypatch):
    """Return a list that grows by the steps that the fast path records."""
    steps, gather = [], FastPath.gather

    def noting(self):
        rows = gather(self)
        steps.extend([] if rows is None else rows.steps_T)
        return rows

    monkeypatch.setattr(FastPath, "gather", noting)
    return steps


def assert_alike(short, long, *, but):
    """Assert that two histories hold the same, but for some statistics."""
    for table in ("param", "act", "run"):
        ours, theirs = getattr(short, table), getattr(long, table)
        np.testing.assert_array_equal(ours.rows()[0], theirs.rows()[0])
        for name in set(ours.statistics) - but:
            np.testing.assert_array_equal(short[name], long[name], err_msg=name)
    assert [e.to_json() for e in short.events] == [e.to_json() for e in long.events]
