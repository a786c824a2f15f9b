"""The host side in order, live and on replay: record a row, write it down, look for illness, show it. No torch."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, final

import numpy as np

from gradwatch import catalogue
from gradwatch.background import Background
from gradwatch.detect import ChoosyDetector, Detector
from gradwatch.diagnose.rank import diagnose
from gradwatch.history.header import Status
from gradwatch.history.store import Floats, Histograms, History, Row
from gradwatch.records import Diagnosis, Event, Finding
from gradwatch.render import Sink

SHOWN_WITHIN = 1024
"""Steps that may wait to be shown; where more do, sinks see only the newest."""
WRITTEN_WITHIN = 32
"""Steps that are written down together where they come fast."""
MOST_PHASES = 1000
"""Steps of a period that are remembered with the detectors that are due; a period is mostly of 20."""
WAITING_BYTES = 64 * 2**20
"""Rows that may wait in memory for a slow disk; where more do, the training waits too."""


class Recorder(Protocol):
    """Writes a history down while it grows: see `gradwatch.history.disk.Writer`."""

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
        self._sinks = list(sinks)
        self._shown_every = {every for sink in sinks if (every := getattr(sink, "every", 1))}
        self._unshown = self._unwritten = 0
        self._period = math.lcm(*(d.every for d in self._detectors))
        self._due_at: dict[int, tuple[list[Detector], list[ChoosyDetector], list[Detector]]] = {}

    def take(self, rows: Sequence[Row], *, waiting: int = 0) -> None:
        """Take optimizer steps in, one after the other.

        Args:
            rows: The steps.
            waiting: Steps that wait behind them. Where they are many, sinks are not shown these, and are told so.
        """
        first = 0
        for last, row in enumerate(rows, start=1):
            asked = self._asked_at(row)
            is_shown = any(row.step % every == 0 for every in self._shown_every)
            if asked or is_shown or row.histograms or last - first == WRITTEN_WITHIN or last == len(rows):
                self._take_together(rows[first:last], asked, waiting=waiting + len(rows) - last)
                first = last

    def _take_together(self, rows: Sequence[Row], asked: Sequence[Detector], *, waiting: int) -> None:
        """Take in steps of which only the last is of interest to detectors."""
        self.history.extend(rows)
        self.history.histograms = rows[-1].histograms or self.history.histograms
        self._unwritten += len(rows)
        if self._unwritten >= WRITTEN_WITHIN:
            self.write()
        for finding in self._detect(asked):
            self.news.append(finding)
            if self.recorder:
                self.write()
                self.recorder.report(finding)
            self._show("report", finding)
        if waiting > SHOWN_WITHIN:
            self._unshown += len(rows)
        elif self._sinks:
            self._show("write", self.history)
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
        text = f"{self._unshown} steps came faster than they could be shown; all of them are recorded"
        self.note(Event(kind="not-shown", step=self.history.step, text=text, values={"steps": float(self._unshown)}))
        self._unshown = 0

    def _detect(self, asked: Sequence[Detector]) -> Iterator[Finding]:
        for detector in asked:
            try:
                found = [finding for finding in detector.detect(self.history) if self.history.report(finding)]
            except Exception as error:  # whatever a plugin raises must not stop the training
                self._give_up(detector, error)
                continue
            yield from found

    def _give_up(self, detector: Detector, error: Exception) -> None:
        self._detectors.remove(detector)
        self._due_at.clear()
        _switched_off(f"detector {detector.kind}", error)

    def _asked_at(self, row: Row) -> Sequence[Detector]:
        """Return the detectors that are asked at a step: those that are due, and may find something."""
        phase = row.step % self._period
        due, choosy, others = self._due_at.get(phase) or self._remember(phase)
        for detector in choosy:
            if not self._is_ruled_out(detector, row):
                return due
        return others

    def _remember(self, phase: int) -> tuple[list[Detector], list[ChoosyDetector], list[Detector]]:
        """Return the detectors that are due at a phase of the period: all, those that may know better, the others."""
        if len(self._due_at) == MOST_PHASES:
            self._due_at.clear()
        due = [d for d in self._detectors if not phase % d.every]
        choosy = [d for d in due if isinstance(d, ChoosyDetector)]
        self._due_at[phase] = due, choosy, [d for d in due if d not in choosy]
        return self._due_at[phase]

    def _is_ruled_out(self, detector: ChoosyDetector, row: Row) -> bool:
        try:
            return detector.rules_out(row.run)
        except Exception as error:  # as above
            self._give_up(detector, error)
            return True

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
        self.news = self._intake.news
        self.found = history.findings
        row_bytes = len(history.info.layers) * len(catalogue.PARAM) * np.dtype(np.float32).itemsize
        limit = max(2 * SHOWN_WITHIN, WAITING_BYTES // max(row_bytes, 1))
        self._background = Background(self._take, then=self._intake.write, limit=limit, name="gradwatch")
        self._newest = history.step

    @property
    def history(self) -> History:
        """All that was fed; waits until it has been taken in."""
        self.finish()
        return self._intake.history

    @property
    def next_step(self) -> int:
        """The step after the newest that was fed."""
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
        """Send one optimizer step through. Arguments as in `History.append`; `param_SL` may be changed afterwards."""
        self._newest = step
        self._background.put(Row(step, run, param_SL.copy(), act_SL, histograms))

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

    def _take(self, items: Sequence[Row | Event]) -> None:
        rows: list[Row] = []
        for item in items:
            if isinstance(item, Row):
                rows.append(item)
                continue
            self._intake.take(rows)
            self._intake.note(item)
            rows = []
        self._intake.take(rows, waiting=len(self._background))


def redetect(stored: History, detectors: Sequence[Detector]) -> History:
    """Return the stored rows again in a history of their own, with what these detectors find in them.

    Over the steps that are kept at full detail this answers what a live run with these detectors would have said.
    """
    intake = Intake(History(stored.info, groups=stored.groups), detectors=detectors)
    param_steps_T, param_TSL = stored.param.rows()
    run_steps_T, run_TS = stored.run.rows()[0], stored.run.rows()[1][:, :, 0]
    act_steps_T, act_TSL = stored.act.rows()
    act_row = {int(step): i for i, step in enumerate(act_steps_T)}
    noted = deque(sorted(stored.events, key=lambda event: event.step))
    assert np.array_equal(param_steps_T, run_steps_T), "both tables have a row per optimizer step"
    rows: list[Row] = []
    for i, step in enumerate(run_steps_T.tolist()):
        if len(rows) == WRITTEN_WITHIN or (noted and noted[0].step <= step):
            intake.take(rows)
            rows = []
        while noted and noted[0].step <= step:
            intake.note(noted.popleft())
        run = dict(zip(stored.run.statistics, run_TS[i].tolist(), strict=True))
        rows.append(Row(step, run, param_TSL[i], act_TSL[act_row[step]] if step in act_row else None))
    intake.take(rows)
    intake.history.events.extend(noted)
    return intake.history


def _switched_off(part: str, error: Exception) -> None:
    warnings.warn(f"gradwatch: {part} is switched off: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=3)
