"""Send a run to Trackio."""

from __future__ import annotations

import contextvars
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding
from gradwatch.render.packages import require
from gradwatch.render.trackers.tracker_sink import (
    PREFIX,
    TrackerSink,
    alert_level,
    alert_text,
    alert_title,
    report_of,
    summary,
)


@final
class Trackio(TrackerSink):
    """Sends a run to Trackio: to the current run, or to a new run that ends with the training.

    All names begin with `gradwatch/`. `gradwatch/step` is the optimizer step, even if your run counts differently.

    Args:
        project: Project of a new run.
        name: Name of a new run; null is the name of the run directory.
        group: Group of a new run.
        space_id: Hugging Face Space for a new run; null keeps the run on this machine.
        every: Optimizer steps between two points of the curves; 0 for never.
        max_layers: Maximum number of layers with findings that get curves.
        directory: Run directory, or None.
        hparams: Settings of the training by dotted key.
    """

    def __init__(
        self,
        *,
        project: str = "gradwatch",
        name: str | None = None,
        group: str | None = None,
        space_id: str | None = None,
        every: int = 10,
        max_layers: int = 8,
        directory: Path | None = None,
        hparams: Mapping[str, Any] | None = None,
    ) -> None:
        require("trackio")
        import trackio  # takes seconds, so only if the sink is used
        from trackio.context_vars import current_run

        self._levels = trackio.AlertLevel
        current = current_run.get()
        self._is_own = current is None
        # in a copy of the context, so that the new run does not become the current run of the user's loop
        self._run = current or contextvars.copy_context().run(
            trackio.init,
            project,
            name=name or (directory.name if directory else None),
            group=group,
            space_id=space_id,
            embed=False,
        )
        super().__init__(every=every, max_layers=max_layers, directory=directory, settings=hparams)

    def _describe(self, settings: Mapping[str, Any]) -> None:
        if self._is_own:
            self._run.config.update(settings)  # sent with the first point

    def _log(self, step: int, points: Mapping[str, float]) -> None:
        row = {f"{PREFIX}{tag}": value for tag, value in points.items()}
        self._run.log({f"{PREFIX}step": step, **row}, step=self._row(step))

    def _alert(self, finding: Finding) -> None:
        level = self._levels[alert_level(finding)]
        self._run.alert(alert_title(finding), alert_text(finding), level=level, step=self._row(finding.step))

    def _row(self, step: int) -> int:
        """Return the step for Trackio: the newest of the user's loop, since a later one would move its counter."""
        if self._is_own:
            return step
        return max(0, getattr(self._run, "_next_step", step + 1) - 1)

    def _end(self, history: History, diagnoses: tuple[Diagnosis, ...]) -> None:
        outcome = summary(history, diagnoses, directory=self.directory)
        self._run.log({f"{PREFIX}{name}": value for name, value in outcome.items()}, step=self._row(history.step))
        if report := report_of(self.directory):
            self._run.log_artifact(report, name=f"gradwatch-{self._run.name}", type="report")
        if self._is_own:
            self._run.finish()
