"""Keep and write incidents: the state that is needed to rerun a step with a critical finding."""

from gradwatch.incident.recorder import Snapshotter, warrants_incident
from gradwatch.incident.step_snapshot import StepRecord, StepSnapshotter

__all__ = ["Snapshotter", "StepRecord", "StepSnapshotter", "warrants_incident"]
