"""Store the history of a run in memory: statistics per step and layer, findings, events and histograms."""

# T = recorded steps, L = layers of a table, S = statistics, K = layers with histograms, B = their bins

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from gradwatch import catalogue
from gradwatch.events import EVENTS_DROPPED, read_event
from gradwatch.history import thinning
from gradwatch.history.ending import Ending
from gradwatch.history.finding_log import FindingLog
from gradwatch.history.table import WINDOW, Floats, Table
from gradwatch.records import ActivationInfo, Event, Finding, RunInfo
from gradwatch.step_time import StepTimer

if TYPE_CHECKING:
    import pandas

__all__ = ["WINDOW", "Floats", "Histograms", "History", "Rows", "SampledStep", "Table"]

MAX_EVENTS = 1000
"""Maximum number of events in a history, so that a loop with an event per step cannot fill the memory."""

VALIDATION = ("val_loss", "val_accuracy")
"""Statistics of the run that a validation measures."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Histograms:
    """The signed histograms of some parameter tensors at one step.

    Args:
        step: Optimizer step.
        edges_B: Edges of the bins, increasing.
        places_K: Indices of the tensors in `RunInfo.layers`.
        grad_KB: Number of gradient elements in each bin.
        weight_KB: Number of weight elements in each bin.
    """

    step: int
    edges_B: NDArray[Any]
    places_K: NDArray[np.intp]
    grad_KB: NDArray[Any]
    weight_KB: NDArray[Any]


class SampledStep(NamedTuple):
    """The values of a step that only some steps measure.

    Args:
        place: Index of the step in `Rows.steps_T`.
        act_SL: Statistics of the activations, or None if the step did not sample them.
        histograms: Histograms, or None if the step has none.
    """

    place: int
    act_SL: Floats | None = None
    histograms: Histograms | None = None


class Rows(NamedTuple):
    """Optimizer steps to append to a history.

    Args:
        steps_T: The steps, increasing.
        run_TS: Statistics of the run, float64, in the order of `History.run.statistics`.
        param_TSL: Statistics of every layer, in the order of `catalogue.PARAM` and `RunInfo.layers`.
        samples: Values that only some of the steps measured, in the order of the steps.
    """

    steps_T: NDArray[np.int64]
    run_TS: Floats
    param_TSL: Floats
    samples: tuple[SampledStep, ...] = ()

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return len(self.steps_T)

    def part(self, first: int, stop: int) -> Rows:
        """Return the rows from index `first` up to, but not including, `stop`. The arrays are views."""
        samples = tuple(s._replace(place=s.place - first) for s in self.samples if first <= s.place < stop)
        return Rows(self.steps_T[first:stop], self.run_TS[first:stop], self.param_TSL[first:stop], samples)


def concatenate(parts: Sequence[Rows]) -> Rows:
    """Join successive rows. A single part is returned unchanged."""
    if len(parts) == 1:  # the usual case, without a copy
        return parts[0]
    steps_T, run_TS, param_TSL = (np.concatenate(arrays) for arrays in zip(*(p[:3] for p in parts), strict=True))
    firsts = itertools.accumulate((part.num_steps for part in parts), initial=0)
    samples = (s._replace(place=first + s.place) for first, p in zip(firsts, parts, strict=False) for s in p.samples)
    return Rows(steps_T, run_TS, param_TSL, tuple(samples))


@final
class History:
    """All recorded data of a run: three tables, the findings and the events.

    `param` has the statistics of each parameter tensor at each step, and `run` the statistics of the whole run.
    `act` has the statistics of each activation module at each sampled step. A missing value is nan. The steps of
    `param` and `run` are always equal.

    Args:
        info: Description of the run.
        groups: Number of optimizer groups, each with a learning rate.

    Attributes:
        findings: Open findings in the order of their reports. `report` adds to them.
        withdrawn: Findings that were withdrawn, in the order of their withdrawals. `withdraw` adds to them.
        events: Events in the order of emission. `add_event` adds to them.
        histograms: The newest histograms of each parameter tensor, with its index in them, by its index in
            `RunInfo.layers`. They are not saved with the run.
        histograms_step: Step of the newest histograms, or -1 before the first.
        trained_s: Seconds that the appended steps took, without the pauses between them.
        ending: How the run ended, or None while it is active.
        directory: The run directory, or None if the history is only in memory.
    """

    def __init__(self, info: RunInfo, *, groups: int = 1) -> None:
        self.info = info
        self.groups = groups
        self.histograms: dict[int, tuple[Histograms, int]] = {}
        self.histograms_step = -1
        self.trained_s = 0.0
        self.ending: Ending | None = None
        self.directory: Path | None = None
        self._step_timer = StepTimer()
        self._log = FindingLog()
        self.findings, self.withdrawn = self._log.open, self._log.withdrawn
        self.events: list[Event] = []
        self._validation_steps: list[int] = []
        self._latest_validations: dict[str, tuple[int, float]] = {}
        # one segment length for all tables, so that all of them keep the same steps
        row_bytes = len(info.layers) * len(catalogue.PARAM_NAMES) * np.dtype(np.float32).itemsize
        self._segment_length = thinning.choose_segment_length(row_bytes)
        self.param = self._table(tuple(layer.name for layer in info.layers), catalogue.PARAM_NAMES, "<f4")
        self.act = self._table(tuple(a.name for a in info.activations), catalogue.ACT_NAMES, "<f4")
        # float64: a batch hash has 48 bits
        self.run = self._table(("",), catalogue.run_names(max(1, groups)), "<f8")  # without groups, the rate is nan
        self._blank_run = dict.fromkeys(self.run.statistics, math.nan)
        self._step_ms = self.run.columns["step_ms"]
        first = self.run.columns[VALIDATION[0]]
        self._validation_columns = slice(first, first + len(VALIDATION))
        assert self.run.statistics[self._validation_columns] == VALIDATION, "the catalogue lists them together"

    @property
    def step(self) -> int:
        """The newest recorded optimizer step, or -1 before the first."""
        return self.run.last_step

    def latest_validation(self, statistic: str) -> tuple[int, float]:
        """Return the step and value of the newest validation with a statistic, or (-1, nan) if there is none.

        Args:
            statistic: One of `VALIDATION`.
        """
        return self._latest_validations.get(statistic, (-1, math.nan))

    def set_activations(self, activations: tuple[ActivationInfo, ...]) -> bool:
        """Replace the activation modules. Return False, without a change, if a step is recorded already."""
        if len(self.param):
            return False
        # a new table forgets the step that `start_at` may have set
        last_step = self.act.last_step
        self.info = replace(self.info, activations=activations)
        self.act = self._table(tuple(a.name for a in activations), catalogue.ACT_NAMES, "<f4")
        self.act.last_step = last_step
        return True

    def row(
        self,
        step: int,
        *,
        run: Mapping[str, float],
        param_SL: Floats,
        act_SL: Floats | None = None,
        histograms: Histograms | None = None,
    ) -> Rows:
        """Return one optimizer step as `Rows`. The arrays are not copied.

        Args:
            step: Optimizer step, from 0.
            run: Statistics of the run by name; missing ones are nan.
            param_SL: Values of shape (S, L) in the order of `catalogue.PARAM` and `info.layers`.
            act_SL: Values of the activations, or None if the step did not sample them.
            histograms: Histograms, or None if the step has none.

        Raises:
            ValueError: `run` has a name that is not a statistic.
        """
        whole = {**self._blank_run, **run}  # in the order of the statistics
        if len(whole) > len(self._blank_run):  # an unknown name has added a key
            unknown, known = ", ".join(sorted(run.keys() - self._blank_run.keys())), ", ".join(self.run.statistics)
            raise ValueError(f"no statistic of the run is called {unknown}; there are {known}")
        run_TS = np.fromiter(whole.values(), np.float64, len(whole))[None]
        samples = () if act_SL is None and histograms is None else (SampledStep(0, act_SL, histograms),)
        return Rows(np.array([step]), run_TS, param_SL[None], samples)

    def append(self, step: int, *, run: Mapping[str, float], param_SL: Floats, act_SL: Floats | None = None) -> None:
        """Append one optimizer step, later than all earlier ones. Arguments as for `row`."""
        self.extend(self.row(step, run=run, param_SL=param_SL, act_SL=act_SL))

    def extend(self, rows: Rows) -> None:
        """Append optimizer steps, in increasing order and later than all earlier ones."""
        self.param.append(rows.steps_T, rows.param_TSL)
        self.run.append(rows.steps_T, rows.run_TS[:, :, None])
        for sample in rows.samples:
            if sample.act_SL is not None:
                self.act.append(rows.steps_T[sample.place : sample.place + 1], sample.act_SL[None])
            if seen := sample.histograms:
                self.histograms |= {place: (seen, k) for k, place in enumerate(seen.places_K.tolist())}
                self.histograms_step = seen.step
        self.trained_s += self._step_timer.training_s(*[ms / 1e3 for ms in rows.run_TS[:, self._step_ms].tolist()])
        self._collect_validations(rows.steps_T, rows.run_TS)

    def report(self, finding: Finding) -> bool:
        """Add a finding if it is the first open one of its kind and layer, or more severe than the earlier one.

        A more severe finding replaces the earlier one and keeps its step and its onset.

        Returns:
            Whether the finding was added.
        """
        return self._log.report(finding)

    def withdraw(self, finding: Finding) -> bool:
        """Move an open finding to the withdrawn ones; see `FindingLog.withdraw`."""
        return self._log.withdraw(finding)

    def add_event(self, event: Event) -> Event | None:
        """Add an event, unless the history has `MAX_EVENTS` events.

        Returns:
            The added event, or None. The last event that fits is replaced by an event that reports dropped events.
        """
        if len(self.events) >= MAX_EVENTS:
            return None
        is_last = len(self.events) == MAX_EVENTS - 1
        added = EVENTS_DROPPED.emit(step=event.step, limit=MAX_EVENTS) if is_last else event
        self.events.append(added)
        return added

    def start_at(self, step: int) -> None:
        """Set the first step of an empty history, to run a part of a run again."""
        for table in self._tables:
            table.last_step = step - 1

    def truncate(self, step: int) -> None:
        """Delete all rows, findings, events and histograms after a step, and undo later withdrawals."""
        for table in self._tables:
            table.truncate(step)
        self._log.truncate(step)
        self.events[:] = [e for e in self.events if e.step <= step]
        # only the newest histograms were kept, so a tensor may have none after this
        self.histograms = {place: (seen, k) for place, (seen, k) in self.histograms.items() if seen.step <= step}
        self.histograms_step = max((seen.step for seen, _ in self.histograms.values()), default=-1)
        self.find_validations()

    def state(self) -> dict[str, Any]:
        """Return all data that detectors may read: the newest steps unthinned, the findings and the events.

        It consists of plain data and arrays for a checkpoint. The run on disk may be thinned after the checkpoint.
        """
        tables = {"param": self.param.state(), "act": self.act.state(), "run": self.run.state()}
        events = [e.to_json() for e in self.events]
        return tables | {"findings": [f.to_json() for f in (*self.withdrawn, *self.findings)], "events": events}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`. Older steps of this history are kept."""
        for name, table in (("param", self.param), ("act", self.act), ("run", self.run)):
            table.restore(state[name])
        self._log.set_all([Finding.from_json(f) for f in state["findings"]])
        self.events[:] = [read_event(e) for e in state["events"]]
        self.find_validations()

    def find_validations(self) -> None:
        """Find the steps with a validation, after a direct change of the tables instead of `extend`."""
        steps_T, values_TSL = self.run.rows(thin=False)
        self._validation_steps.clear()
        self._latest_validations.clear()
        self._collect_validations(steps_T, values_TSL[:, :, 0])

    def _collect_validations(self, steps_T: NDArray[np.int64], run_TS: Floats) -> None:
        """Record the steps and the values of the validations in some rows."""
        values_TV = run_TS[:, self._validation_columns]
        if math.isnan(np.fmax.reduce(values_TV, axis=None, initial=math.nan)):
            return  # almost all rows end here, after 1 us
        for step, values in zip(steps_T.tolist(), values_TV.tolist(), strict=True):
            known = {name: (step, x) for name, x in zip(VALIDATION, values, strict=True) if not math.isnan(x)}
            if known:
                self._validation_steps.append(step)
                self._latest_validations |= known

    def scalar(self, statistic: str, length: int = WINDOW) -> NDArray[np.float64]:
        """Return a statistic of the run over the newest steps, of shape (T,) with T at most `length`."""
        values_T: NDArray[np.float64] = self.run.window(statistic, length)[:, 0].astype(np.float64, copy=False)
        return values_T

    def table(self, statistic: str) -> Table:
        """Return the table of a statistic."""
        for table in self._tables:
            if statistic in table.statistics:
                return table
        known = ", ".join(name for table in self._tables for name in table.statistics)
        raise KeyError(f"no statistic is called '{statistic}'; there are {known}")

    def __getitem__(self, statistic: str) -> Floats:
        """Return a statistic at all kept steps: shape (T, L), or (T,) for a statistic of the run."""
        table = self.table(statistic)
        values_TL = table.series(statistic)[1]
        return values_TL[:, 0] if table is self.run else values_TL

    def steps(self, statistic: str) -> NDArray[np.int64]:
        """Return the kept steps of the table of a statistic, of shape (T,)."""
        return self.table(statistic).series(statistic)[0]

    def frame(self, statistic: str) -> pandas.DataFrame:
        """Return a statistic as a pandas data frame with a row per step and a column per layer. Needs pandas."""
        import pandas  # optional: only this method needs it

        table = self.table(statistic)
        steps_T, values_TL = table.series(statistic)
        columns = [statistic] if table is self.run else list(table.layers)
        return pandas.DataFrame(values_TL, index=pandas.Index(steps_T, name="step"), columns=columns)

    @property
    def _tables(self) -> tuple[Table, Table, Table]:
        return self.param, self.act, self.run

    def _table(self, layers: tuple[str, ...], statistics: tuple[str, ...], dtype: str) -> Table:
        return Table(layers, statistics, dtype=dtype, segment_length=self._segment_length, keep=self._is_kept)

    def _is_kept(self, steps_T: NDArray[np.int64]) -> NDArray[np.bool_]:
        return thinning.is_kept(
            steps_T,
            newest=int(steps_T[-1]),
            length=self._segment_length,
            # sorted: a withdrawal must not change which findings are the first
            findings=sorted(f.step for f in (*self.findings, *self.withdrawn)),
            validations=self._validation_steps,
        )
