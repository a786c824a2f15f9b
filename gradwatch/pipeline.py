"""The host side in order, live and on replay: record a row, write it down, look for illness, show it. No torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Detector
from gradwatch.diagnose.rank import diagnose
from gradwatch.history.header import Status
from gradwatch.history.store import Floats, History
from gradwatch.records import Diagnosis, Finding
from gradwatch.render import Sink


class Recorder(Protocol):
    """Writes a history down while it grows: see `gradwatch.history.disk.Writer`."""

    def append(self) -> None:
        """Write the newest step of the history."""
        ...

    def report(self, finding: Finding) -> None:
        """Write a finding."""
        ...

    def close(self, status: Status) -> None:
        """Note how the run ended, and let go of its files."""
        ...


@final
class Pipeline:
    """What happens to a row once it is on the host.

    A detector or a sink that raises is switched off with one warning: no mistake of the monitor's stops a training.
    What the user can mend, such as a full disk under the recorder, is raised.

    Args:
        history: Where rows and findings are kept.
        detectors: Asked at every step that is a multiple of their `every`.
        sinks: Shown every step and finding.
        recorder: Writes the history to disk, or None.
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
        self._detectors = list(detectors)
        self._sinks = list(sinks)

    def feed(
        self, step: int, *, run: Mapping[str, float], param_SL: Floats, act_SL: NDArray[Any] | None = None
    ) -> None:
        """Take one optimizer step through the pipeline. Arguments as in `History.append`."""
        self.history.append(step, run=run, param_SL=param_SL, act_SL=act_SL)
        if self.recorder:
            self.recorder.append()
        for finding in self._detect(step):
            if self.recorder:
                self.recorder.report(finding)
            self._show("report", finding)
        self._show("write", self.history)

    def close(self, status: Status) -> tuple[Diagnosis, ...]:
        """End the sinks, note on disk how the run ended, and return the diagnoses."""
        diagnoses = self.end_sinks()
        if self.recorder:
            self.recorder.close(status)
        return diagnoses

    def end_sinks(self) -> tuple[Diagnosis, ...]:
        """Diagnose the run, let every sink show its end, once, and return the diagnoses."""
        diagnoses = diagnose(self.history)
        self._show("close", self.history, diagnoses)
        self._sinks.clear()
        return diagnoses

    def _detect(self, step: int) -> Iterator[Finding]:
        for detector in [detector for detector in self._detectors if not step % detector.every]:
            try:
                found = [finding for finding in detector.detect(self.history) if self.history.report(finding)]
            except Exception as error:  # whatever a plugin raises must not stop the training
                self._detectors.remove(detector)
                _switched_off(f"detector {detector.kind}", error)
                continue
            yield from found

    def _show(self, method: str, *args: object) -> None:
        for sink in tuple(self._sinks):
            try:
                getattr(sink, method)(*args)
            except Exception as error:  # as above: a sink shows, it does not decide
                self._sinks.remove(sink)
                _switched_off(f"sink {type(sink).__name__}", error)


def redetect(stored: History, detectors: Sequence[Detector]) -> History:
    """Return the stored rows again in a history of their own, with what these detectors find in them.

    Over the steps that are kept at full detail this answers what a live run with these detectors would have said.
    """
    history = History(stored.info, groups=stored.groups)
    pipeline = Pipeline(history, detectors=detectors)
    param_steps_T, param_TSL = stored.param.rows()
    run_steps_T, run_TS = stored.run.rows()[0], stored.run.rows()[1][:, :, 0]
    act_steps_T, act_TSL = stored.act.rows()
    act_row = {int(step): i for i, step in enumerate(act_steps_T)}
    assert np.array_equal(param_steps_T, run_steps_T), "both tables have a row per optimizer step"
    for i, step in enumerate(run_steps_T.tolist()):
        act_SL = act_TSL[act_row[step]] if step in act_row else None
        run = dict(zip(stored.run.statistics, run_TS[i].tolist(), strict=True))
        pipeline.feed(step, run=run, param_SL=param_TSL[i], act_SL=act_SL)
    return history


def _switched_off(part: str, error: Exception) -> None:
    warnings.warn(f"gradwatch: {part} is switched off: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=3)
