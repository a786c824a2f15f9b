"""Ingest rows and events on a worker thread: write them, run detectors, show findings. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import final

import numpy as np

from gradwatch import catalogue
from gradwatch.attempts import Attempts
from gradwatch.detect import Detector
from gradwatch.events import Observation
from gradwatch.history.ending import Ending, Status
from gradwatch.history.store import Floats, Histograms, History, Rows, concatenate
from gradwatch.pipeline.ingest import MAX_END_S, MAX_UNSHOWN_STEPS, Ingest, RunWriter
from gradwatch.pipeline.ranks.comparison import RankComparison
from gradwatch.pipeline.ranks.shards import ShardJoin
from gradwatch.pipeline.worker import Worker
from gradwatch.records import Diagnosis, Event, Finding
from gradwatch.render import Sink

MAX_WAITING_BYTES = 64 * 2**20
"""Size of the rows that may wait in memory for a slow disk. If there are more, the training waits as well."""

SHARDS = "the joining of shards"


@final
class Pipeline:
    """Ingest rows and events on a worker thread, so that no training step waits for them.

    The next call raises an exception of the thread. Other arguments as for `Ingest`.

    Args:
        first_step: Step of the first row, if it is later than the step after the history. The steps in between are
            unknown.
        shards: Joins the statistics of sharded parameters from the files of the other ranks, or None. Rows then wait
            for these files.

    Attributes:
        unhandled_findings: Findings without an action so far. The caller that acts on them clears the list. It grows on
            the worker thread.
        findings: All findings in the ingested rows. It grows on the worker thread.
        attempts: Counts the failures of the parts that work on the training thread.
        row_source: Returns the rows that follow the last `feed`, or None if there are none. Called on any thread.
    """

    def __init__(
        self,
        history: History,
        *,
        detectors: Sequence[Detector] = (),
        sinks: Sequence[Sink] = (),
        writer: RunWriter | None = None,
        first_step: int = 0,
        ranks: RankComparison | None = None,
        shards: ShardJoin | None = None,
    ) -> None:
        self._shards = shards
        warned: set[str] = set()
        self._ingest = Ingest(history, detectors=detectors, sinks=sinks, writer=writer, ranks=ranks, warned=warned)
        self.attempts = Attempts(self._report_left_out, warned=warned)
        self.row_source: Callable[[], Rows | None] = lambda: None
        self.unhandled_findings: list[Finding] = self._ingest.unhandled_findings
        self.findings = history.findings
        # without the columns of the run, which are few
        row_bytes = len(history.info.layers) * len(catalogue.PARAM) * np.dtype(np.float32).itemsize
        max_waiting_rows = max(2 * MAX_UNSHOWN_STEPS, MAX_WAITING_BYTES // max(row_bytes, 1))
        self._worker: Worker[Rows | Event] = Worker(
            self._process,
            source=self._next_rows,
            when_idle=self._ingest.write,
            is_holding=lambda: shards is not None and shards.is_holding,
            limit=max_waiting_rows,
            name="gradwatch",
        )
        self._first_step = first_step
        self._newest_step = max(history.step, first_step - 1)  # of the rows that were passed to the worker

    @property
    def history(self) -> History:
        """The history of all rows so far. Waits until the worker has ingested the rows, except those that are held."""
        self.finish()
        return self._ingest.history

    @property
    def next_step(self) -> int:
        """The step after the newest of all rows so far, including rows that wait."""
        self.pull()
        # an idle worker has ingested all rows, and the history may have been truncated since
        newest_step = self._newest_step if self._worker.is_busy else self._ingest.history.step
        return max(newest_step + 1, self._first_step)

    @property
    def cpu_s(self) -> float:
        """Processor time that the worker has used so far."""
        return self._worker.cpu_s

    @property
    def is_holding(self) -> bool:
        """Whether a row waits for the other ranks."""
        return self._shards is not None and self._shards.is_holding

    def feed(
        self,
        step: int,
        *,
        run: Mapping[str, float],
        param_SL: Floats,
        act_SL: Floats | None = None,
        histograms: Histograms | None = None,
    ) -> None:
        """Pass one optimizer step to the worker. Arguments as for `History.row`; the arrays must not change later."""
        rows = self._ingest.history.row(step, run=run, param_SL=param_SL, act_SL=act_SL, histograms=histograms)
        self._worker.put(rows)  # the rows of the source come first, as they are older
        self._newest_step = step

    def pull(self) -> None:
        """Pass the rows that the row source has ready to the worker."""
        self._worker.pull()

    def finish(self) -> None:
        """Wait until all rows and events so far are ingested."""
        self._worker.finish()

    def add_event(self, event: Event) -> None:
        """Pass an event to the worker, after the rows before it."""
        self._worker.put(event)

    def abandon(self) -> None:
        """Leave the run to the parent process, in a forked child: drop all rows and events from now on."""
        self._worker.abandon()

    def close(self, status: Status) -> tuple[Diagnosis, ...]:
        """End the sinks, write the final status of the run, and return the diagnoses.

        Args:
            status: Final status. A caller that knows more has set the ending of the history.
        """
        # before the sinks end: they show it
        history = self._ingest.history
        history.ending = history.ending or Ending(kind=status)
        diagnoses = self.end_sinks()
        if self._ingest.writer:
            self._ingest.writer.close(status)
        return diagnoses

    def discard(self) -> None:
        """Release the run directory of a run that is not wanted. Sinks are not ended, so that they print nothing."""
        self.finish()
        self._ingest.discard()

    def end_sinks(self) -> tuple[Diagnosis, ...]:
        """Diagnose the run, close every sink once, and return the diagnoses."""
        try:
            self.attempts.end()
            if self._shards:
                self._shards.end(MAX_END_S)
            self.finish()
            self._ingest.end_detection()
        finally:  # a live view must restore the screen even if the last rows failed
            diagnoses = self._ingest.end_sinks()
        return diagnoses

    def _report_left_out(self, observation: Observation) -> None:
        # of the step in progress; the rows of the fast path may be newer
        self.add_event(observation.at(self._newest_step + 1))

    def _next_rows(self) -> Rows | None:
        rows = self.row_source()
        if rows is not None:
            self._newest_step = int(rows.steps_T[-1])
        return rows

    def _process(self, items: Sequence[Rows | Event]) -> None:
        """Ingest rows and events in order, with successive rows in one batch."""
        if self._shards:
            items = self._join_shards(self._shards, items)
        parts: list[Rows] = []
        num_rows = 0
        for item in items:
            more = 0 if isinstance(item, Event) else item.num_steps
            # the rows before an event come first, so that the event gets its place in the history
            if isinstance(item, Event) or num_rows + more > self._ingest.max_rows_at_once:
                self._ingest_rows(parts)
                num_rows = 0
            if isinstance(item, Event):
                self._ingest.add_event(item)
            else:
                parts.append(item)
                num_rows += more
        self._ingest_rows(parts)

    def _join_shards(self, shards: ShardJoin, items: Sequence[Rows | Event]) -> list[Rows | Event]:
        """Return the items that no longer wait for other ranks."""
        shards.hold(items)
        ready = self._ingest.attempts.run(SHARDS, shards.take)
        # after a failure, the next call takes them; after the last one, they are shown as they are
        return shards.take_all() if SHARDS in self._ingest.attempts.left_out else ready or []

    def _ingest_rows(self, parts: list[Rows]) -> None:
        if parts:
            rows = concatenate(parts)  # the cost per row falls with their number
            parts.clear()
            self._ingest.ingest(rows, num_in_flight=max(0, self._newest_step - int(rows.steps_T[-1])))
