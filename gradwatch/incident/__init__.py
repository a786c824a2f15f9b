"""Incidents: what it takes to run a step again at which something critical was found, kept, written and read."""

from gradwatch.incident.reading import Incident, incidents
from gradwatch.incident.recorder import Snapshotter, warrants_incident
from gradwatch.incident.step_snapshot import StepRecord, StepSnapshotter

__all__ = ["Incident", "Snapshotter", "StepRecord", "StepSnapshotter", "incidents", "warrants_incident"]
