"""Incidents: what it takes to run a step again at which something critical was found, kept, written and read."""

from gradwatch.incident.reading import Incident, incidents
from gradwatch.incident.recorder import Recorder, matters
from gradwatch.incident.step_snapshot import Keeper, Record

__all__ = ["Incident", "Keeper", "Record", "Recorder", "incidents", "matters"]
