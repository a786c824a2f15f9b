"""The host side in order, live and on replay: record a row, write it down, look for illness, show it. No torch."""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, final

import numpy as np

from gradwatch import catalogue
from gradwatch.detect import ChoosyDetector, Detector
from gradwatch.diagnose.rank import diagnose
from gradwatch.events import NOT_SHOWN
from gradwatch.history.disk.header import Status
from gradwatch.history.lookahead import Ahead
from gradwatch.history.store import WINDOW, Floats, Histograms, History, Rows, Sample, joined
from gradwatch.pipeline.worker import Background
from gradwatch.records import Diagnosis, Event, Finding
from gradwatch.render import Sink

SHOWN_WITHIN = 4096
"""Steps that may wait to be shown; where more do, sinks see only the newest."""
WRITTEN_WITHIN_S = 1.0
"""Time for which a row that was taken in may wait to be written, as where a slow sink is shown others meanwhile."""
MOST_PHASES = 1000
"""Steps of a period that are remembered with the detectors that are due; a period is mostly of 20."""
WAITING_BYTES = 64 * 2**20
"""Rows that may wait in memory for a slow disk; where more do, the training waits too."""


class Recorder(Protocol):
    """Writes a history down while it grows: see `gradwatch.history.disk.writer.Writer`."""

    def append(self) -> None:
        """Write the steps of the history that have not been written yet."""
        ...

    def report(self, finding: Finding) -> None:
        """Write a finding."""
        ...

    def note(self, event: Event) -> None:
        """Write an event."""
        ...

    def close(self, status: Status) -> None:
        """Note how the run ended, and let go of its files."""
        ...


@final
class Intake:
    """Takes rows into a history, in their order: written down, looked at, shown.

    A detector or a sink that raises is switched off with one warning: no mistake of the monitor's stops a training.
    What the user can mend, such as a full disk under the recorder, is raised.

    Args:
        history: Where rows and findings are kept.
        detectors: Asked at every step that is a multiple of their `every`.
        sinks: Shown every finding, and at least each step that is a multiple of their `every`, where they have one.
        recorder: Writes the history to disk, or None.

    Attributes:
        news: Findings that nobody has acted on; whoever does clears it.
        takes_within: Steps that are taken in together at most: the more, the less each costs.
    """

    def __init__(
        self,
        history: History,
        *,
        detectors: Sequence[Detector] = (),
        sinks: Sequence[Sink] = (),
        recorder: Recorder | None = None,
    ) -> None:
        self.history = history
        self.recorder = recorder
        self.news: list[Finding] = []
        self._detectors = list(detectors)
        self._choosy = [d for d in self._detectors if isinstance(d, ChoosyDetector)]
        self._given_up: set[int] = set()
        self._sinks = list(sinks)
        self._shown_every = {every for sink in sinks if (every := getattr(sink, "every", 1))}
        self.takes_within = max(WINDOW, history.param.slack)
        self._unshown = self._unwritten = self._num_found = 0
        self._unwritten_since = 0.0
        self._period = math.lcm(*(d.every for d in self._detectors))
        self._due_at: dict[int, list[Detector]] = {}

    def take(self, rows: Rows, *, waiting: int = 0) -> None:
        """Take optimizer steps in, and look at the history as it is after those at which somebody wants to.

        Args:
            rows: The steps.
            waiting: Steps that wait behind them. Where they are many, sinks are not shown these, and are told so.
        """
        asked: dict[int, list[Detector]] = {}
        first = 0
        if self._unwritten > WINDOW:  # what leaves the window now could not be written any more
            self.write()
        for stop in self.history.taking(rows, stops=self._stops(rows, asked)):
            self._look(asked.get(stop, ()), stop - first, waiting=waiting + rows.num_steps - stop)
            first = stop

    def _stops(self, rows: Rows, asked: dict[int, list[Detector]]) -> Iterator[int]:
        """Yield after how many of the steps somebody wants to look; put into `asked` which detectors do."""
        shown_T = functools.reduce(np.logical_or, [rows.steps_T % e == 0 for e in self._shown_every], np.False_)
        shown = {*(np.flatnonzero(shown_T) + 1).tolist(), rows.num_steps}
        shown |= {sample.place + 1 for sample in rows.samples if sample.histograms}
        first = 0
        while first < rows.num_steps:
            asked.clear()
            asked.update(self._asked(rows, first))
            num_found = self._num_found
            for stop in sorted(asked.keys() | {stop for stop in shown if stop > first}):
                yield stop
                first = stop
                if self._num_found > num_found:
                    break  # detectors may think otherwise of the steps to come

    def _look(self, asked: Sequence[Detector], count: int, *, waiting: int) -> None:
        """Look at the newest of some steps that were taken in."""
        if not self._unwritten:
            self._unwritten_since = time.monotonic()
        self._unwritten += count
        for finding in self._detect(asked):
            self._num_found += 1
            self.news.append(finding)
            if self.recorder:
                self.write()
                self.recorder.report(finding)
            self._show("report", finding)
        if waiting > SHOWN_WITHIN:
            self._unshown += count
        elif self._sinks:
            self._show("write", self.history)
            if time.monotonic() - self._unwritten_since > WRITTEN_WITHIN_S:
                self.write()
            if self._unshown:
                self._own_up()

    def write(self) -> None:
        """Write down the steps that were taken in and are not on disk yet."""
        if self.recorder and self._unwritten:
            self.recorder.append()
        self._unwritten = 0

    def note(self, event: Event) -> None:
        """Take in an event: into the history and, where one is written, onto disk."""
        kept = self.history.note(event)
        if kept and self.recorder:
            self.write()
            self.recorder.note(kept)

    def end_sinks(self) -> tuple[Diagnosis, ...]:
        """Diagnose the run, let every sink show its end, once, and return the diagnoses."""
        diagnoses = diagnose(self.history)
        self._show("close", self.history, diagnoses)
        self._sinks.clear()
        return diagnoses

    def _own_up(self) -> None:
        """Note how many steps no sink was shown."""
        self.note(NOT_SHOWN.emit(step=self.history.step, values={"steps": self._unshown}))
        self._unshown = 0

    def _detect(self, asked: Sequence[Detector]) -> list[Finding]:
        news: list[Finding] = []
        for detector in asked:
            if id(detector) in self._given_up:  # a few steps before
                continue
            try:
                for finding in detector.detect(self.history):
                    if self.history.report(finding):
                        news.append(finding)
            except Exception as error:  # whatever a plugin raises must not stop the training
                self._give_up(detector, error)
        return news

    def _give_up(self, detector: Detector, error: Exception) -> None:
        self._given_up.add(id(detector))
        self._detectors = [d for d in self._detectors if d is not detector]
        self._choosy = [d for d in self._choosy if d is not detector]
        self._due_at.clear()
        _switched_off(f"detector {detector.kind}", error)

    def _asked(self, rows: Rows, first: int) -> dict[int, list[Detector]]:
        """Return the detectors that are asked after so many steps of those behind the first: due, and not ruled out."""
        not_ruled_out: dict[int, list[Detector]] = {}
        aheads = {e: Ahead(self.history, every=e, samples=rows.samples) for e in {d.every for d in self._choosy}}
        for detector in tuple(self._choosy):
            for place in self._places_for(detector, aheads[detector.every]):
                not_ruled_out.setdefault(first + place, []).append(detector)
        asked = {}
        for i, step in enumerate(rows.steps_T[first:].tolist(), start=first):
            due = self._due(step % self._period)
            if choosy := not_ruled_out.get(i):
                wanted = {id(d) for d in (*due, *choosy)}
                asked[i + 1] = [d for d in self._detectors if id(d) in wanted]
            elif due:
                asked[i + 1] = due
        return asked

    def _due(self, phase: int) -> list[Detector]:
        """Return the detectors that are asked at each step of a phase of the period, whatever it is like."""
        due = self._due_at.get(phase)
        if due is None:
            if len(self._due_at) == MOST_PHASES:
                self._due_at.clear()
            due = [d for d in self._detectors if not phase % d.every and d not in self._choosy]
            self._due_at[phase] = due
        return due

    def _places_for(self, detector: ChoosyDetector, ahead: Ahead) -> list[int]:
        """Return the places ahead at which a detector is due that does not rule them out."""
        try:
            return ahead.places_D[~detector.rules_out(ahead)].tolist() if len(ahead) else []
        except Exception as error:  # as above
            self._give_up(detector, error)
            return []

    def _show(self, method: str, *args: object) -> None:
        for sink in tuple(self._sinks):
            try:
                getattr(sink, method)(*args)
            except Exception as error:  # as above: a sink shows, it does not decide
                self._sinks.remove(sink)
                _switched_off(f"sink {type(sink).__name__}", error)


@final
class Pipeline:
    """An intake on a thread of its own, so that no step waits for it.

    What it raises is raised by the next call. Arguments as for `Intake`.

    Attributes:
        news: Findings that nobody has acted on yet; whoever does takes them out. It grows while rows are taken in.
        found: All findings so far, whatever still waits; it grows likewise.
        source: Called, on whatever thread, for rows that follow what was fed; None where there are none.
    """

    def __init__(
        self,
        history: History,
        *,
        detectors: Sequence[Detector] = (),
        sinks: Sequence[Sink] = (),
        recorder: Recorder | None = None,
    ) -> None:
        self._intake = Intake(history, detectors=detectors, sinks=sinks, recorder=recorder)
        self.source: Callable[[], Rows | None] = _nothing
        self.news = self._intake.news
        self.found = history.findings
        row_bytes = len(history.info.layers) * len(catalogue.PARAM) * np.dtype(np.float32).itemsize
        limit = max(2 * SHOWN_WITHIN, WAITING_BYTES // max(row_bytes, 1))
        self._background: Background[Rows | Event] = Background(
            self._take, source=self._gather, then=self._intake.write, limit=limit, name="gradwatch"
        )
        self._newest = history.step

    @property
    def history(self) -> History:
        """All that was fed; waits until it has been taken in."""
        self.finish()
        return self._intake.history

    @property
    def next_step(self) -> int:
        """The step after the newest that was fed, or that the source has."""
        self.pull()
        newest = self._newest if self._background.is_busy else self._intake.history.step
        return newest + 1

    @property
    def busy_s(self) -> float:
        """Processor time that taking rows in has cost so far."""
        return self._background.busy_s

    def feed(
        self,
        step: int,
        *,
        run: Mapping[str, float],
        param_SL: Floats,
        act_SL: Floats | None = None,
        histograms: Histograms | None = None,
    ) -> None:
        """Send one optimizer step through. Arguments as in `History.row`; the arrays are handed over."""
        rows = self._intake.history.row(step, run=run, param_SL=param_SL, act_SL=act_SL, histograms=histograms)
        self._background.put(rows)
        self._newest = step

    def pull(self) -> None:
        """See to it that what the source has is taken in in time."""
        self._background.pull()

    def finish(self) -> None:
        """Return when all that was fed has been taken in."""
        self._background.finish()

    def note(self, event: Event) -> None:
        """Take in an event, after the rows before it."""
        self._background.put(event)

    def close(self, status: Status) -> tuple[Diagnosis, ...]:
        """End the sinks, note on disk how the run ended, and return the diagnoses."""
        diagnoses = self.end_sinks()
        if self._intake.recorder:
            self._intake.recorder.close(status)
        return diagnoses

    def end_sinks(self) -> tuple[Diagnosis, ...]:
        """Diagnose the run, let every sink show its end, once, and return the diagnoses."""
        try:
            self.finish()
        finally:  # a live view must give the screen back, whatever became of the last rows
            diagnoses = self._intake.end_sinks()
        return diagnoses

    def _gather(self) -> Rows | None:
        rows = self.source()
        if rows is not None:
            self._newest = int(rows.steps_T[-1])
        return rows

    def _take(self, items: Sequence[Rows | Event]) -> None:
        parts: list[Rows] = []
        waiting = 0
        for item in items:
            coming = 0 if isinstance(item, Event) else item.num_steps
            if not coming or waiting + coming > self._intake.takes_within:
                self._take_rows(parts)
                waiting = 0
            if isinstance(item, Event):
                self._intake.note(item)
            else:
                parts.append(item)
                waiting += coming
        self._take_rows(parts)

    def _take_rows(self, parts: list[Rows]) -> None:
        """Take rows in together, and out of the list."""
        if parts:
            rows = joined(parts)
            parts.clear()
            self._intake.take(rows, waiting=max(0, self._newest - int(rows.steps_T[-1])))


def _nothing() -> None:
    return None


def redetect(stored: History, detectors: Sequence[Detector]) -> History:
    """Return the stored rows again in a history of their own, with what these detectors find in them.

    Over the steps that are kept at full detail this answers what a live run with these detectors would have said.
    """
    intake = Intake(History(stored.info, groups=stored.groups), detectors=detectors)
    param_steps_T, param_TSL = stored.param.rows()
    run_steps_T, run_TS = stored.run.rows()[0], stored.run.rows()[1][:, :, 0]
    act_steps_T, act_TSL = stored.act.rows()
    act = dict(zip(act_steps_T.tolist(), act_TSL, strict=True))
    noted = deque(sorted(stored.events, key=lambda event: event.step))
    assert np.array_equal(param_steps_T, run_steps_T), "both tables have a row per optimizer step"
    first = 0

    def take(end: int) -> None:
        nonlocal first
        if end > first:
            part = slice(first, end)
            steps_T = run_steps_T[part]
            samples = tuple(Sample(i, act[step]) for i, step in enumerate(steps_T.tolist()) if step in act)
            intake.take(Rows(steps_T, run_TS[part], param_TSL[part], samples))
            first = end

    for i, step in enumerate(run_steps_T.tolist()):
        if i - first == intake.takes_within or (noted and noted[0].step <= step):
            take(i)
        while noted and noted[0].step <= step:
            intake.note(noted.popleft())
    take(len(run_steps_T))
    intake.history.events.extend(noted)
    return intake.history


def _switched_off(part: str, error: Exception) -> None:
    warnings.warn(f"gradwatch: {part} is switched off: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=3)
