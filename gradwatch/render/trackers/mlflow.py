"""Send a run to MLflow."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from gradwatch.history.ending import Status
from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding
from gradwatch.render.packages import require
from gradwatch.render.trackers.tracker_sink import PREFIX, TrackerSink, report_of, summary

STATUS: Mapping[Status, str] = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
"""Names in MLflow for the ways in which a run ends."""
INVALID = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow refuses in names."""
MAX_PARAMS = 100
"""Maximum number of params that MLflow accepts at once."""


@final
class Mlflow(TrackerSink):
    """Sends a run to MLflow: to the active run, or to a new run that ends with the training.

    The names of metrics begin with `gradwatch/`, and the names of tags with `gradwatch.`. Each finding is a tag.

    Args:
        tracking_uri: Server or folder of a new run; null leaves the choice to MLflow, such as MLFLOW_TRACKING_URI.
        experiment: Experiment of a new run, which is created if it does not exist; null leaves the choice to MLflow.
        name: Name of a new run; null is the name of the run directory.
        every: Optimizer steps between two points of the curves; 0 for never.
        max_layers: Maximum number of layers with findings that get curves.
        directory: Run directory, or None.
        hparams: Settings of the training by dotted key.
    """

    def __init__(
        self,
        *,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        name: str | None = None,
        every: int = 10,
        max_layers: int = 8,
        directory: Path | None = None,
        hparams: Mapping[str, Any] | None = None,
    ) -> None:
        require("mlflow")
        import mlflow  # takes seconds, so only if the sink is used
        from mlflow import environment_variables as given

        self._entities = mlflow.entities
        # not the fluent functions, which act on the active run of their thread: this sink has its own thread
        active = mlflow.active_run()
        self._client = mlflow.MlflowClient(None if active else tracking_uri)
        self._is_own = active is None
        if active:
            self._run_id = active.info.run_id
        else:
            # `mlflow.set_experiment` sets the variable of the id
            experiment = experiment or given.MLFLOW_EXPERIMENT_NAME.get()
            number = self._experiment_id(experiment) if experiment else given.MLFLOW_EXPERIMENT_ID.get() or "0"
            name = name or (directory.name if directory else None)
            self._run_id = self._client.create_run(number, run_name=name).info.run_id
        super().__init__(every=every, max_layers=max_layers, directory=directory, settings=hparams)

    def _experiment_id(self, name: str) -> str:
        known = self._client.get_experiment_by_name(name)
        return str(known.experiment_id if known else self._client.create_experiment(name))

    def _describe(self, settings: Mapping[str, Any]) -> None:
        if self._is_own:
            params = [self._entities.Param(_valid(key), str(value)) for key, value in settings.items()]
            self._client.log_batch(self._run_id, params=params[:MAX_PARAMS])

    def _log(self, step: int, points: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1e3)
        metrics = [self._entities.Metric(_valid(PREFIX + tag), value, now_ms, step) for tag, value in points.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def _alert(self, finding: Finding) -> None:
        # without the step, so that a withdrawal replaces the tag of its finding
        key = _valid(f"gradwatch.{finding.kind}.{finding.layer or 'run'}")
        text = f"withdrawn: {finding.life}" if finding.withdrawn is not None else str(finding)
        self._client.set_tag(self._run_id, key, text)

    def _end(self, history: History, diagnoses: tuple[Diagnosis, ...]) -> None:
        for name, value in summary(history, diagnoses, directory=self.directory).items():
            self._client.set_tag(self._run_id, f"gradwatch.{name}", value)
        if report := report_of(self.directory):
            self._client.log_artifact(self._run_id, str(report), artifact_path="gradwatch")
        if self._is_own:
            status = history.ending.status if history.ending else "finished"
            self._client.set_terminated(self._run_id, STATUS.get(status, "FINISHED"))


def _valid(name: str) -> str:
    return INVALID.sub("_", name)
