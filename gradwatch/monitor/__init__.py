"""Connect device and host: probe a model at every optimizer step and feed one row to the pipeline."""

from gradwatch.monitor.budget import Schedule
from gradwatch.monitor.monitor import Monitor, record_failure
from gradwatch.monitor.row import total_norm

__all__ = ["Monitor", "Schedule", "record_failure", "total_norm"]
