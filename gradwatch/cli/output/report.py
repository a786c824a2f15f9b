"""Write report.html of a recorded run again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradwatch.config.settings import changed_settings
from gradwatch.history.store import History
from gradwatch.paths import RUN_CONFIG
from gradwatch.records import Diagnosis
from gradwatch.render.report.sink import NAME, write_report


def write_run_report(target: Path | None, run: Path, history: History, diagnoses: Sequence[Diagnosis]) -> Path:
    """Write the report into the run directory, or to `target`, and return its path."""
    config, path = run / RUN_CONFIG, target or run / NAME
    # a run of a user's own loop has no config.yaml
    text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
    write_report(path, history, diagnoses, run=run, config_text=text, changed_text=changed_settings(run))
    return path
