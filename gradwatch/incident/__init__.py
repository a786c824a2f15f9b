"""Keep, write and read incidents: the state that is needed to rerun a step with a critical finding."""

from gradwatch.incident.reading import Incident, incidents
from gradwatch.incident.recorder import Snapshotter, warrants_incident
from gradwatch.incident.step_snapshot import StepRecord, StepSnapshotter

__all__ = ["Incident", "Snapshotter", "StepRecord", "StepSnapshotter", "incidents", "warrants_incident"]
