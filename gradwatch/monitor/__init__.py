"""Where device meets host: probe a model at every optimizer step and feed the pipeline with one row."""

from gradwatch.monitor.budget import Schedule
from gradwatch.monitor.monitor import Monitor
from gradwatch.monitor.optimizer_tracker import total_norm

__all__ = ["Monitor", "Schedule", "total_norm"]
