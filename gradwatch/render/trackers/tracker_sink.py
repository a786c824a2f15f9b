"""Decide what an experiment tracker shows and when: curves, layers with findings, alerts and a summary."""

from __future__ import annotations

import functools
import math
import time
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding, Severity
from gradwatch.render.common.layers import Layer, layers, matrices
from gradwatch.render.common.run_stats import environment, health
from gradwatch.render.report.sink import NAME as REPORT
from gradwatch.render.tensorboard import charts
from gradwatch.render.tensorboard.excerpt import HistoryExcerpt
from gradwatch.render.tensorboard.throttle import Throttle
from gradwatch.render.trackers.outbox import Outbox
from gradwatch.render.trackers.points import layer_points, layers_of, quantiles

PREFIX = "gradwatch/"
"""Prefix of all names in a tracker, so that they never replace names of the user's own loop."""
MAX_ALERTS_PER_KIND = 3
"""Maximum number of alerts for a kind of finding. A tracker may send each as a message to people."""
COST_FRAC = 0.002
"""Share of the training time that points may take, on other threads than the training's."""
GRACE_S = 0.25
"""Seconds that points may take beyond `COST_FRAC`: about 100 points, so that a short run has curves too."""
CLOSE_S = 60.0
"""Maximum seconds for which the end of a run waits for a server."""


class TrackerSink(ABC):
    """Sends a run to a tracker on a separate thread, so that a slow server delays nothing.

    A subclass opens its run in its constructor, which runs on the thread of the training: some libraries know the
    user's open run on that thread only. All other methods of a subclass are called on the thread that sends.

    Args:
        every: Optimizer steps between two points of the curves; 0 for never.
        max_layers: Maximum number of layers with findings that get curves.
        directory: Run directory, or None.
        settings: Settings of the training by dotted key, for a run that the sink has started.

    Attributes:
        sends_all_findings: Whether every finding is sent, including notes. Otherwise, each kind has few alerts.
    """

    sends_all_findings: ClassVar[bool] = False

    def __init__(
        self,
        *,
        every: int,
        max_layers: int,
        directory: Path | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.every = every
        self.directory = directory
        self._max_layers = max_layers
        self._settings = dict(settings or {})
        self._throttle = Throttle(every, fraction=COST_FRAC, grace_s=GRACE_S)
        self._outbox = Outbox(f"gradwatch {type(self).__name__}", on_broken=self._warn)
        self._charged_s = 0.0
        self._nonfinite = 0
        self._newest = self._written = self._validated = -1
        self._num_alerts: Counter[str] = Counter()
        self._alerted: set[tuple[str, str | None]] = set()
        self._layers: tuple[Layer, ...] = ()
        self._matrices: tuple[Layer, ...] = ()
        self._shown_layers: list[Layer] = []

    def open(self, history: History) -> None:
        """Describe the run."""
        self._layers, self._matrices = layers(history.info.layers), matrices(history.info.layers)
        settings = self._settings or environment(history.info)
        self._outbox.put(functools.partial(self._describe, settings))

    def write(self, history: History) -> None:
        """Send the curves, if a point is due and within its quota."""
        step = history.run.last_step
        if step < self._newest:  # the run was rewound, and does the steps again
            self._throttle.rewind(step)
            self._written, self._validated = min(self._written, step - 1), min(self._validated, step - 1)
            self._nonfinite = charts.nonfinite_steps(history, until=step - 1)
        self._newest = step
        if self._throttle.grants(step, elapsed_s=history.trained_s):
            self._write_points(history)

    def report(self, finding: Finding) -> None:
        """Send an alert for a new finding, unless its kind has had enough. Begin curves of its layers."""
        for layer in layers_of(finding, self._layers):
            if layer not in self._shown_layers and len(self._shown_layers) < self._max_layers:
                self._shown_layers.append(layer)
        if finding.severity is Severity.INFO and not self.sends_all_findings:
            return
        self._num_alerts[finding.kind] += 1
        if self._num_alerts[finding.kind] <= MAX_ALERTS_PER_KIND or self.sends_all_findings:
            self._alerted.add((finding.kind, finding.layer))
            self._outbox.put(functools.partial(self._alert, finding))

    def withdraw(self, finding: Finding) -> None:
        """Send that a finding no longer holds, if it had an alert."""
        if (finding.kind, finding.layer) in self._alerted:
            self._outbox.put(functools.partial(self._alert, finding))

    def close(self, history: History, diagnoses: tuple[Diagnosis, ...]) -> None:
        """Send the last point, the report and the summary, and wait until everything is sent."""
        if self.every and history.step > self._written:
            self._write_points(history)
        self._outbox.close(functools.partial(self._end, history, diagnoses), timeout_s=CLOSE_S)

    @abstractmethod
    def _describe(self, settings: Mapping[str, Any]) -> None:
        """Show the settings of the training, if the sink has started the tracker's run."""

    @abstractmethod
    def _log(self, step: int, points: Mapping[str, float]) -> None:
        """Show a point of each curve, by tag."""

    @abstractmethod
    def _alert(self, finding: Finding) -> None:
        """Show a finding that is new, or one that no longer holds."""

    @abstractmethod
    def _end(self, history: History, diagnoses: tuple[Diagnosis, ...]) -> None:
        """Show the outcome, and finish the tracker's run if the sink has started it."""

    def _write_points(self, history: History) -> None:
        # processor time: the quota limits the cores taken from the training, whatever else the machine does
        began_s = time.thread_time()
        if validations := charts.validation_block(history, after=self._validated):
            for step, values in charts.points_of(validations):
                self._outbox.put(functools.partial(self._log, step, _finite(values)))
        newest = HistoryExcerpt.newest(history, after=self._written)
        blocks = charts.run_blocks(history, self._matrices, newest, nonfinite=self._nonfinite)
        self._nonfinite = int(blocks[0].values[charts.NONFINITE][-1])
        points = quantiles(history, self._layers) | layer_points(history, self._shown_layers)
        for block in blocks:  # of the newest step, or the newest one with activations
            points |= _finite({tag: float(values_P[-1]) for tag, values_P in block.values.items()})
        self._outbox.put_point(functools.partial(self._log, history.step, points))
        self._written = self._validated = history.step
        sent_s, self._charged_s = self._outbox.cpu_s - self._charged_s, self._outbox.cpu_s
        self._throttle.quota.charge(time.thread_time() - began_s + sent_s)

    def _warn(self, error: Exception) -> None:
        text = f"{type(self).__name__} fails ({type(error).__name__}: {error}); nothing more of this run is sent to it"
        # line 0: Python would print a line of this file below the warning
        warnings.warn_explicit(f"gradwatch: {text}", RuntimeWarning, __file__, 0)


def _finite(points: Mapping[str, float]) -> dict[str, float]:
    return {tag: value for tag, value in points.items() if math.isfinite(value)}


def alert_level(finding: Finding) -> str:
    """Return the level of an alert: `INFO`, `WARN` or `ERROR`."""
    if finding.withdrawn is not None:
        return "INFO"
    return "ERROR" if finding.severity is Severity.CRITICAL else "WARN"


def alert_title(finding: Finding) -> str:
    """Return the title of an alert, below the 64 characters that W&B accepts."""
    return f"{'withdrawn: ' if finding.withdrawn is not None else ''}{finding.kind} ({finding.code})"


def alert_text(finding: Finding) -> str:
    """Return the text of an alert."""
    return finding.life if finding.withdrawn is not None else str(finding)


def summary(history: History, diagnoses: tuple[Diagnosis, ...], *, directory: Path | None) -> dict[str, str | int]:
    """Return the outcome of a run by name: health, findings, and the most likely cause with its remedy."""
    problems = [finding for finding in history.findings if finding.severity > Severity.INFO]
    made: dict[str, str | int] = {
        "health": health(history),
        "findings": len(problems),
        "withdrawn_findings": sum(f.severity > Severity.INFO for f in history.withdrawn),
    }
    if problems and diagnoses:
        first = diagnoses[0]
        made |= {"cause": f"{first.cause} ({first.sureness})"}
        made |= {"fix": first.remedies[0].text} if first.remedies else {}
    return made | ({"run_dir": str(directory)} if directory else {})


def report_of(directory: Path | None) -> Path | None:
    """Return the report in a run directory, or None if there is none."""
    path = directory / REPORT if directory else None
    return path if path and path.is_file() else None
