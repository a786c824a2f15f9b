"""The history in memory: per statistic, layer and step. Recent steps lie in one piece, older ones are thinned."""

# T = recorded steps, L = layers (rows of a table), S = statistics, K = layers with histograms, B = their bins

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from gradwatch import catalogue
from gradwatch.events import EVENTS_DROPPED, read_event
from gradwatch.history import thinning
from gradwatch.history.table import WINDOW, Floats, Table
from gradwatch.records import ActivationInfo, Event, Finding, RunInfo
from gradwatch.step_time import StepTimer

if TYPE_CHECKING:
    import pandas

__all__ = ["WINDOW", "Floats", "Histograms", "History", "Rows", "SampledStep", "Table"]

MAX_EVENTS = 1000
"""Events that a history holds: enough for a person to read, and bounded however many are emitted."""

VALIDATION = ("val_loss", "val_accuracy")


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Histograms:
    """Signed histograms of some parameter tensors at one step.

    Args:
        step: Optimizer step.
        edges_B: Edges of the bins, growing.
        places_K: Which tensors, by their places in `RunInfo.layers`.
        grad_KB: Elements of each gradient per bin.
        weight_KB: Elements of each weight per bin.
    """

    step: int
    edges_B: NDArray[Any]
    places_K: NDArray[np.intp]
    grad_KB: NDArray[Any]
    weight_KB: NDArray[Any]


class SampledStep(NamedTuple):
    """What a step holds that not every step does.

    Args:
        place: Which of the rows it belongs to, counted from 0.
        act_SL: Statistics of the activations, where it sampled them.
        histograms: Histograms, where it has them.
    """

    place: int
    act_SL: Floats | None = None
    histograms: Histograms | None = None


class Rows(NamedTuple):
    """Optimizer steps on their way into the history.

    Args:
        steps_T: The steps, growing.
        run_TS: Statistics of the run, float64, in the order of `History.run.statistics`.
        param_TSL: Statistics of every layer, in the order of `catalogue.PARAM` and `RunInfo.layers`.
        samples: What some of the steps hold besides, in their order.
    """

    steps_T: NDArray[np.int64]
    run_TS: Floats
    param_TSL: Floats
    samples: tuple[SampledStep, ...] = ()

    @property
    def num_steps(self) -> int:
        """How many steps there are."""
        return len(self.steps_T)

    def part(self, first: int, stop: int) -> Rows:
        """Return the rows from `first` up to `stop`, which is left out. The arrays are views."""
        samples = tuple(s._replace(place=s.place - first) for s in self.samples if first <= s.place < stop)
        return Rows(self.steps_T[first:stop], self.run_TS[first:stop], self.param_TSL[first:stop], samples)


def concatenate(parts: Sequence[Rows]) -> Rows:
    """Return rows that follow each other as one."""
    if len(parts) == 1:
        return parts[0]
    steps_T, run_TS, param_TSL = (np.concatenate(arrays) for arrays in zip(*(p[:3] for p in parts), strict=True))
    firsts = itertools.accumulate((part.num_steps for part in parts), initial=0)
    samples = (s._replace(place=first + s.place) for first, p in zip(firsts, parts, strict=False) for s in p.samples)
    return Rows(steps_T, run_TS, param_TSL, tuple(samples))


@final
class History:
    """All that was recorded of a run: three tables, the findings and the events.

    `param` has a row per parameter tensor and step, `act` a row per activation module and sampled step, `run` one row
    per step for the run as a whole. Missing is nan. `param` and `run` always hold the same steps.

    Args:
        info: What it is a history of.
        groups: Number of optimizer groups, each with a learning rate.

    Attributes:
        histograms: Where the newest histograms of each parameter tensor are: these, and its place in them, by its place
            in `RunInfo.layers`. They are not saved with the run.
        histograms_step: Step of the newest of them, -1 before the first.
        trained_s: Seconds that the steps took which were appended here, pauses between them left out.
    """

    def __init__(self, info: RunInfo, *, groups: int = 1) -> None:
        self.info = info
        self.groups = groups
        self.histograms: dict[int, tuple[Histograms, int]] = {}
        self.histograms_step = -1
        self.trained_s = 0.0
        self._step_timer = StepTimer()
        self._findings: list[Finding] = []
        self._events: list[Event] = []
        self._place: dict[tuple[str, str | None], int] = {}
        self._marked: list[int] = []
        self._validated: dict[str, tuple[int, float]] = {}
        # one length for all: a step that is kept in one table is kept in the others
        row_bytes = len(info.layers) * len(catalogue.PARAM_NAMES) * np.dtype(np.float32).itemsize
        self._length = thinning.segment_length(row_bytes)
        self.param = self._table(tuple(layer.name for layer in info.layers), catalogue.PARAM_NAMES, "<f4")
        self.act = self._table(tuple(a.name for a in info.activations), catalogue.ACT_NAMES, "<f4")
        self.run = self._table(("",), catalogue.run_names(groups), "<f8")
        self._blank_run = dict.fromkeys(self.run.statistics, math.nan)
        self._step_ms = self.run.columns["step_ms"]
        first = self.run.columns[VALIDATION[0]]
        self._validation_columns = slice(first, first + len(VALIDATION))
        assert self.run.statistics[self._validation_columns] == VALIDATION, "the catalogue lists them together"

    @property
    def step(self) -> int:
        """The newest recorded optimizer step, or -1 before the first."""
        return self.run.last_step

    @property
    def findings(self) -> list[Finding]:
        """What was found, in the order of its finding. `report` adds to it."""
        return self._findings

    @property
    def events(self) -> list[Event]:
        """What happened besides the statistics, in the order in which it was noted. `note` adds to it."""
        return self._events

    def validated(self, statistic: str) -> tuple[int, float]:
        """Return step and value of the newest validation that gave a statistic; (-1, nan) where none has.

        Args:
            statistic: One of `VALIDATION`.
        """
        return self._validated.get(statistic, (-1, math.nan))

    def lay_out(self, activations: tuple[ActivationInfo, ...]) -> bool:
        """Settle which activations there are, and say whether that could be done: before the first row."""
        if len(self.param):
            return False
        begins_after = self.act.last_step
        self.info = replace(self.info, activations=activations)
        self.act = self._table(tuple(a.name for a in activations), catalogue.ACT_NAMES, "<f4")
        self.act.last_step = begins_after
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
        """Return one optimizer step as it goes into the history; the arrays are not copied.

        Args:
            step: Optimizer step, from 0.
            run: Statistics of the run by name; those left out are nan.
            param_SL: Values of shape (S, L) in the order of `catalogue.PARAM` and `info.layers`.
            act_SL: The same for activations, on the steps that sampled them.
            histograms: Histograms, on the steps that have them.
        """
        whole = {**self._blank_run, **run}  # in the order of the statistics
        if len(whole) > len(self._blank_run):
            unknown, known = ", ".join(sorted(run.keys() - self._blank_run.keys())), ", ".join(self.run.statistics)
            raise ValueError(f"no statistic of the run is called {unknown}; there are {known}")
        run_TS = np.fromiter(whole.values(), np.float64, len(whole))[None]
        samples = () if act_SL is None and histograms is None else (SampledStep(0, act_SL, histograms),)
        return Rows(np.array([step]), run_TS, param_SL[None], samples)

    def append(self, step: int, *, run: Mapping[str, float], param_SL: Floats, act_SL: Floats | None = None) -> None:
        """Record one optimizer step. Arguments as for `row`; the step must grow."""
        self.extend(self.row(step, run=run, param_SL=param_SL, act_SL=act_SL))

    def extend(self, rows: Rows) -> None:
        """Record optimizer steps, which must grow."""
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
        """Take in a finding, where it is news: the first of its kind and layer, or graver than before.

        A graver one takes the place of the earlier one and keeps its step.

        Returns:
            Whether it was news.
        """
        if len(self._place) != len(self._findings):  # somebody appended to the list itself
            self._place = {(f.kind, f.layer): i for i, f in enumerate(self._findings)}
        i = self._place.get((finding.kind, finding.layer))
        if i is None:
            self._place[finding.kind, finding.layer] = len(self._findings)
            self._findings.append(finding)
            return True
        earlier = self._findings[i]
        if finding.severity > earlier.severity:
            self._findings[i] = replace(finding, step=earlier.step)
        return finding.severity > earlier.severity

    def note(self, event: Event) -> Event | None:
        """Take in an event.

        Returns:
            What was added: the event, or in the last place one that says that there were more; None where it is full.
        """
        if len(self._events) >= MAX_EVENTS:
            return None
        kept = event if len(self._events) < MAX_EVENTS - 1 else _events_dropped(event.step)
        self._events.append(kept)
        return kept

    def begin(self, step: int) -> None:
        """Let an empty history start at a step, for the rerun of a part of a run."""
        for table in (self.param, self.act, self.run):
            table.last_step = step - 1

    def truncate(self, step: int) -> None:
        """Forget all that was recorded, noted or first found after a step."""
        for table in (self.param, self.act, self.run):
            table.truncate(step)
        self._findings[:] = [f for f in self._findings if f.step <= step]
        self._events[:] = [e for e in self._events if e.step <= step]
        self.histograms = {place: (seen, k) for place, (seen, k) in self.histograms.items() if seen.step <= step}
        self.histograms_step = max((seen.step for seen, _ in self.histograms.values()), default=-1)
        self._place.clear()
        self.mark_validation()

    def state(self) -> dict[str, Any]:
        """Return what detectors may look at: the newest steps at full detail, the findings and the events.

        It is plain data and arrays, for a checkpoint: on disk a long run may have been thinned since.
        """
        tables = {"param": self.param.state(), "act": self.act.state(), "run": self.run.state()}
        noted = [e.to_json() for e in self._events]
        return tables | {"findings": [f.to_json() for f in self._findings], "events": noted}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave, on top of the older steps that this history holds."""
        self.param.restore(state["param"])
        self.act.restore(state["act"])
        self.run.restore(state["run"])
        self._findings[:] = [Finding.from_json(f) for f in state["findings"]]
        self._events[:] = [read_event(e) for e in state.get("events", ())]  # older checkpoints have none
        self._place.clear()
        self.mark_validation()

    def mark_validation(self) -> None:
        """Look up the steps on which validation was measured, after rows were put in that `append` did not see."""
        steps_T, values_TSL = self.run.rows(thin=False)
        self._marked.clear()
        self._validated.clear()
        self._collect_validations(steps_T, values_TSL[:, :, 0])

    def _collect_validations(self, steps_T: NDArray[np.int64], run_TS: Floats) -> None:
        """Remember the steps on which validation was measured, and the newest values."""
        values_TV = run_TS[:, self._validation_columns]
        if math.isnan(np.fmax.reduce(values_TV, axis=None, initial=math.nan)):
            return  # almost all rows, in 1 us
        for step, values in zip(steps_T.tolist(), values_TV.tolist(), strict=True):
            known = {name: (step, x) for name, x in zip(VALIDATION, values, strict=True) if not math.isnan(x)}
            if known:
                self._marked.append(step)
                self._validated |= known

    def scalar(self, statistic: str, length: int = WINDOW) -> NDArray[np.float64]:
        """Return a statistic of the run over the newest steps, of shape (at most length,)."""
        values_T: NDArray[np.float64] = self.run.window(statistic, length)[:, 0].astype(np.float64, copy=False)
        return values_T

    def table(self, statistic: str) -> Table:
        """Return the table that holds a statistic."""
        for table in (self.param, self.act, self.run):
            if statistic in table.statistics:
                return table
        known = ", ".join((*self.param.statistics, *self.act.statistics, *self.run.statistics))
        raise KeyError(f"no statistic is called '{statistic}'; there are {known}")

    def __getitem__(self, statistic: str) -> Floats:
        """Return all that is kept of a statistic: shape (T, L), or (T,) for one of the run."""
        table = self.table(statistic)
        values_TL = table.series(statistic)[1]
        return values_TL[:, 0] if table is self.run else values_TL

    def steps(self, statistic: str) -> NDArray[np.int64]:
        """Return the steps at which a statistic is kept, of shape (T,)."""
        return self.table(statistic).series(statistic)[0]

    def frame(self, statistic: str) -> pandas.DataFrame:
        """Return a statistic as a pandas frame: steps down, layers across. Needs pandas."""
        import pandas

        table = self.table(statistic)
        steps_T, values_TL = table.series(statistic)
        columns = [statistic] if table is self.run else list(table.layers)
        return pandas.DataFrame(values_TL, index=pandas.Index(steps_T, name="step"), columns=columns)

    def _table(self, layers: tuple[str, ...], statistics: tuple[str, ...], dtype: str) -> Table:
        return Table(layers, statistics, dtype=dtype, segment_length=self._length, keep=self._kept)

    def _kept(self, steps_T: NDArray[np.int64]) -> NDArray[np.bool_]:
        found = [f.step for f in self._findings]
        return thinning.kept(steps_T, newest=int(steps_T[-1]), length=self._length, findings=found, marked=self._marked)


def _events_dropped(step: int) -> Event:
    """Return the event that says that there were more than a history holds."""
    return EVENTS_DROPPED.emit(step=step, limit=MAX_EVENTS)
