"""Run detectors again over the stored rows of a run."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import numpy as np

from gradwatch.detect import Detector
from gradwatch.events import LEFT_OUT
from gradwatch.history.store import History, Rows, SampledStep
from gradwatch.pipeline.ingest import Ingest


def redetect(stored: History, detectors: Sequence[Detector]) -> History:
    """Return a new history of the stored rows and events, with the findings of the given detectors.

    Over steps at full detail, the findings equal the findings of a live run with these detectors.
    """
    ingest = Ingest(History(stored.info, groups=stored.groups), detectors=detectors)
    rows = _all_rows(stored)
    # a detector that the live run left out is attempted again
    kept = [it for it in stored.events if not (it.kind == LEFT_OUT.name and it.values["detector"])]
    events = deque(sorted(kept, key=lambda event: event.step))
    # split before each event: a detector may read events, and must not see an event before its step
    before_events = np.searchsorted(rows.steps_T, [event.step for event in events]).tolist()
    every_max = range(0, rows.num_steps, ingest.max_rows_at_once)
    for first, stop in itertools.pairwise(sorted({0, *before_events, *every_max, rows.num_steps})):
        while events and events[0].step <= rows.steps_T[first]:
            ingest.add_event(events.popleft())
        ingest.ingest(rows.part(first, stop))
    ingest.history.events.extend(events)  # events after the last row
    ingest.history.ending = stored.ending
    ingest.end_detection()
    ingest.attempts.end()
    return ingest.history


def _all_rows(stored: History) -> Rows:
    param_steps_T, param_TSL = stored.param.rows()
    run_steps_T, run_TS1 = stored.run.rows()
    assert np.array_equal(param_steps_T, run_steps_T), "both tables have a row per optimizer step"
    act_steps_T, act_TSL = stored.act.rows()
    act_at_step = dict(zip(act_steps_T.tolist(), act_TSL, strict=True))
    steps = run_steps_T.tolist()
    samples = tuple(SampledStep(i, act_at_step[step]) for i, step in enumerate(steps) if step in act_at_step)
    return Rows(run_steps_T, run_TS1[:, :, 0], param_TSL, samples)
