"""Send a run to Weights & Biases."""

from __future__ import annotations

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
class Wandb(TrackerSink):
    """Sends a run to Weights & Biases: to the open run, or to a new run that ends with the training.

    All names begin with `gradwatch/`, and their x axis is `gradwatch/step`, the optimizer step.

    Args:
        project: Project of a new run; null leaves the choice to W&B.
        name: Name of a new run; null is the name of the run directory.
        entity: Team or user of a new run; null leaves the choice to W&B.
        group: Group of a new run.
        tags: Tags of a new run.
        own_rows: Whether each point is a separate row in W&B. In a run of yours, that would advance the step of
            `wandb.log`, so null means true for a new run only. With false, a point waits for your next `wandb.log`.
        every: Optimizer steps between two points of the curves; 0 for never.
        max_layers: Maximum number of layers with findings that get curves.
        directory: Run directory, or None.
        hparams: Settings of the training by dotted key.
    """

    def __init__(
        self,
        *,
        project: str | None = None,
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        own_rows: bool | None = None,
        every: int = 10,
        max_layers: int = 8,
        directory: Path | None = None,
        hparams: Mapping[str, Any] | None = None,
    ) -> None:
        require("wandb")
        import wandb  # takes seconds, so only if the sink is used

        self._wandb = wandb
        self._is_own = wandb.run is None
        self._run = wandb.run or wandb.init(
            project=project,
            name=name or (directory.name if directory else None),
            entity=entity,
            group=group,
            tags=tags,
            # leaves `wandb.run` alone: rows of the user's loop would share the step with the rows of this sink
            reinit="create_new",
            # a live view in the terminal redraws several times a second
            settings=wandb.Settings(console="off"),
        )
        self._commits = self._is_own if own_rows is None else own_rows
        self._run.define_metric(f"{PREFIX}step", hidden=True)
        self._run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")
        super().__init__(every=every, max_layers=max_layers, directory=directory, settings=hparams)

    def _describe(self, settings: Mapping[str, Any]) -> None:
        if self._is_own:
            self._run.config.update(dict(settings))

    def _log(self, step: int, points: Mapping[str, float]) -> None:
        row = {f"{PREFIX}{tag}": value for tag, value in points.items()}
        self._run.log({f"{PREFIX}step": step, **row}, commit=self._commits)

    def _alert(self, finding: Finding) -> None:
        self._run.alert(alert_title(finding), alert_text(finding), level=alert_level(finding))

    def _end(self, history: History, diagnoses: tuple[Diagnosis, ...]) -> None:
        outcome = summary(history, diagnoses, directory=self.directory)
        self._run.summary.update({f"{PREFIX}{name}": value for name, value in outcome.items()})
        if report := report_of(self.directory):
            artifact = self._wandb.Artifact(f"gradwatch-{self._run.id}", type="report")
            artifact.add_file(str(report))
            self._run.log_artifact(artifact)
        if self._is_own:
            has_failed = history.ending is not None and history.ending.status == "failed"
            self._run.finish(exit_code=int(has_failed))
