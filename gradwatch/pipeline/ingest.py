"""Append rows to the history in order, write them to disk, run the detectors and notify the sinks. No torch."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.attempts import DETECTOR, SINK, Attempts
from gradwatch.detect import Detector, EndDetector, RankDetector, TriggeredDetector, WithdrawingDetector, due_T
from gradwatch.detect.features.consequences import cause_depth
from gradwatch.diagnose.rank import diagnose
from gradwatch.events import NOT_SHOWN, Observation
from gradwatch.history.ending import Status
from gradwatch.history.store import WINDOW, History, Rows
from gradwatch.pipeline.ranks.comparison import RankComparison
from gradwatch.records import Diagnosis, Event, Finding
from gradwatch.render import Sink

MAX_UNSHOWN_STEPS = 4096
"""Maximum number of steps in flight at which sinks see every row. Above it, sinks see only the newest row."""
MAX_UNWRITTEN_S = 1.0
"""Maximum time for which a recorded row stays unwritten while slow sinks show other rows."""
MAX_END_S = 5.0
"""Maximum time for which the end of a run waits for the last steps of the other ranks."""
RANKS = "the comparison of ranks"
OPTIONAL_METHODS = ("open", "withdraw", "discard")
"""Methods that sinks of other packages may lack."""


class RunWriter(Protocol):
    """Writes a growing history to disk; see `gradwatch.history.disk.writer.Writer`."""

    def append(self) -> None:
        """Write the steps of the history that are not on disk yet."""
        ...

    def report(self, finding: Finding) -> None:
        """Write a finding."""
        ...

    def add_event(self, event: Event) -> None:
        """Write an event."""
        ...

    def close(self, status: Status) -> None:
        """Write the final status of the run, and close the files."""
        ...


@final
class Ingest:
    """Append rows to a history in order, write them to disk, run the detectors and notify the sinks.

    A detector or a sink that raises is attempted again when it is due, and left out after several failures in a row. A
    bug in the monitor must not stop a training. Errors that the user can fix, such as a full disk, are raised.

    Args:
        history: Receives the rows and the findings.
        detectors: Detectors. Each runs at the steps of `due_T`, or at the steps that its triggers select.
        sinks: Sinks. Each sees every finding, and every step, or the multiples of its `every` if it has one.
        writer: Writes the history to disk, or None.
        ranks: Compares the ranks of a distributed training, or None.
        warned: Names of the warnings that were given, shared with the training thread.

    Attributes:
        attempts: Counts the failures of detectors and sinks.
        unhandled_findings: Findings without an action so far. The caller that acts on them clears the list.
        max_rows_at_once: Maximum number of rows per call of `ingest`. The cost per row falls with their number.
    """

    def __init__(
        self,
        history: History,
        *,
        detectors: Sequence[Detector] = (),
        sinks: Sequence[Sink] = (),
        writer: RunWriter | None = None,
        warned: set[str] | None = None,
        ranks: RankComparison | None = None,
    ) -> None:
        self.history = history
        self.ranks = ranks
        self.attempts = Attempts(self._report_left_out, warned=warned)
        self.writer = writer
        self.unhandled_findings: list[Finding] = []
        # as many rows as fit after the window of the table, and at least a window
        self.max_rows_at_once = max(WINDOW, history.param.slack)
        self._detectors = tuple(sorted(detectors, key=lambda detector: cause_depth(detector.kind)))  # causes first
        self._triggers = {id(d): d.triggers_T for d in detectors if isinstance(d, TriggeredDetector)}
        self._withdrawing = {id(d): d for d in detectors if isinstance(d, WithdrawingDetector)}
        self._sinks = list(sinks)
        self._num_unshown = self._num_unwritten = 0
        self._unwritten_since_s = 0.0
        self._show("open", history)

    def ingest(self, rows: Rows, *, num_in_flight: int = 0) -> None:
        """Append optimizer steps, and inspect the history after each step at which a detector or a sink is due.

        Args:
            rows: The steps.
            num_in_flight: Number of later steps that wait. If it is too large, sinks skip these rows, and an event
                reports the number of skipped rows.
        """
        num_left, first = rows.num_steps, 0
        for last, detectors in self._plan(rows):
            if self._num_unwritten > WINDOW:  # rows that left the window can no longer be written
                self.write()
            chunk = rows.part(first, last + 1)
            self.history.extend(chunk)
            if self.ranks:
                self.ranks.add(chunk)
                self._compare_ranks(self.ranks.poll)
            num_left -= chunk.num_steps
            self._process(detectors, chunk.num_steps, num_in_flight=num_in_flight + num_left)
            first = last + 1

    def _plan(self, rows: Rows) -> Iterator[tuple[int, list[Detector]]]:
        """Yield the index of each row after which a detector or a sink is due, and the due detectors."""
        detectors = [d for d in self._detectors if _part_of(d) not in self.attempts.left_out]
        due_DT = np.zeros((len(detectors), rows.num_steps), np.bool_)
        for is_due_T, detector in zip(due_DT, detectors, strict=True):
            is_due_T[:] = self._due_T(detector, rows)
        is_stop_T: NDArray[np.bool_] = np.logical_or.reduce(due_DT)
        for every in {getattr(sink, "every", 1) for sink in self._sinks} - {0}:  # 0 is a sink that asks for no step
            is_stop_T |= rows.steps_T % every == 0
        # sinks see each histogram; the history holds only the newest
        is_stop_T[[sample.place for sample in rows.samples if sample.histograms]] = True
        is_stop_T[-1] = True  # the rest of the rows is appended as well
        for row in is_stop_T.nonzero()[0].tolist():
            yield row, [d for d, is_due in zip(detectors, due_DT[:, row].tolist(), strict=True) if is_due]

    def _due_T(self, detector: Detector, rows: Rows) -> NDArray[np.bool_]:
        """Return a mask of the rows after which a detector is due; all False if the detector raises."""
        triggers_T = self._triggers.get(id(detector))
        if triggers_T is None:
            return due_T(detector.every, rows.steps_T)
        part, place = _part_of(detector), f"triggers of {detector.kind}"
        try:
            with np.errstate(all="ignore"):  # as in `_detect`
                is_due_T = np.broadcast_to(triggers_T(rows, self.history), rows.steps_T.shape)
            self.attempts.conclude(part, None, place=place)
        except Exception as error:  # as in `_detect`
            self.attempts.conclude(part, error, place=place)
            is_due_T = np.zeros(rows.num_steps, np.bool_)
        return is_due_T

    def _process(self, detectors: Sequence[Detector], num_steps: int, *, num_in_flight: int) -> None:
        """Run the due detectors at the newest step and show the step, after `num_steps` steps were appended."""
        if not self._num_unwritten:
            self._unwritten_since_s = time.monotonic()
        self._num_unwritten += num_steps
        self._report(self._detect(detectors))
        if num_in_flight > MAX_UNSHOWN_STEPS:
            self._num_unshown += num_steps
        elif self._sinks:
            self._show("write", self.history)
            if time.monotonic() - self._unwritten_since_s > MAX_UNWRITTEN_S:
                self.write()
            if self._num_unshown:
                self._report_skipped()

    def _report(self, findings: Sequence[Finding]) -> None:
        """Write and show findings that are new, more severe or withdrawn."""
        for finding in findings:
            if self.writer:
                self.write()  # first: the rows behind a finding are on disk before the finding
                self.writer.report(finding)
            if finding.withdrawn is None:
                self.unhandled_findings.append(finding)
                self._show("report", finding)
            else:
                self._show("withdraw", finding)

    def write(self) -> None:
        """Write the appended steps that are not on disk yet."""
        if self.writer and self._num_unwritten:
            self.writer.append()
        self._num_unwritten = 0

    def add_event(self, event: Event) -> None:
        """Append an event to the history, and to the file on disk if there is a writer."""
        kept = self.history.add_event(event)
        if self.ranks:
            self.ranks.add_event(event)
        if kept and self.writer:
            self.write()
            self.writer.add_event(kept)

    def end_detection(self) -> None:
        """Compare the last steps of all ranks, and run the detectors that run once more at the end."""
        ending: list[Detector] = [d for d in self._detectors if isinstance(d, EndDetector)]
        if self.ranks and self.history.step >= 0:
            self._compare_ranks(functools.partial(self.ranks.wait, MAX_END_S))
            ending += [d for d in self._detectors if isinstance(d, RankDetector)]
        self._report(self._detect(ending))

    def _compare_ranks(self, compare: Callable[[], list[Event]]) -> None:
        for event in self.attempts.run(RANKS, compare) or ():
            self.add_event(event)

    def end_sinks(self) -> tuple[Diagnosis, ...]:
        """Diagnose the run, close every sink once, and return the diagnoses."""
        self.attempts.end()
        diagnoses = diagnose(self.history)
        self._show("close", self.history, diagnoses)
        self._sinks.clear()  # a second call closes none
        return diagnoses

    def discard(self) -> None:
        """Release the run directory and the files of the sinks, which show nothing of the end."""
        self._show("discard")
        self._sinks.clear()
        if self.writer:
            self.writer.close("interrupted")

    def _report_skipped(self) -> None:
        self.add_event(NOT_SHOWN.emit(step=self.history.step, values={"steps": self._num_unshown}))
        self._num_unshown = 0

    def _report_left_out(self, observation: Observation) -> None:
        self.add_event(observation.at(max(self.history.step, 0)))

    def _detect(self, detectors: Sequence[Detector]) -> list[Finding]:
        """Run detectors at the newest step, and return the findings that are withdrawn, new, or more severe."""
        news: list[Finding] = []
        for detector in detectors:
            part, failure = _part_of(detector), None
            if part in self.attempts.left_out:  # at an earlier step of the same call of `ingest`
                continue
            try:
                with np.errstate(all="ignore"):  # NaN and Inf are data here
                    if self.history.findings and id(detector) in self._withdrawing:
                        news += self._withdraw(self._withdrawing[id(detector)])
                    for finding in detector.detect(self.history):
                        if self.history.report(finding):
                            news.append(finding)
            except Exception as error:  # an error of a plugin must not stop the training
                failure = error
            self.attempts.conclude(part, failure)
        return news

    def _withdraw(self, detector: WithdrawingDetector) -> list[Finding]:
        """Withdraw the findings of a detector that no longer hold at the newest step, and return them."""
        over: list[Finding] = []
        for finding in [f for f in self.history.findings if f.kind == detector.kind and f.step < self.history.step]:
            if end := detector.recovery(self.history, finding):
                was = replace(finding, withdrawn=self.history.step, ended=end.step, reason=end.reason)
                over += [was] if self.history.withdraw(was) else []
        return over

    def _show(self, method: str, *args: object) -> None:
        for sink in self._sinks:
            part = f"{SINK}{type(sink).__name__}"
            if part in self.attempts.left_out or (method in OPTIONAL_METHODS and not hasattr(sink, method)):
                continue
            failure = None
            try:
                getattr(sink, method)(*args)
            except Exception as error:  # as in `_detect`
                failure = error
            self.attempts.conclude(part, failure, place=f"{part}.{method}", is_last=method == "close")


def _part_of(detector: Detector) -> str:
    return f"{DETECTOR}{detector.kind}"
