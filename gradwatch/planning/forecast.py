"""Plan the memory of a training that has ended, so that the plan stands beside the measured peak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradwatch.config.sections.root import Config
from gradwatch.planning.training import ConfigPlanner
from gradwatch.train.training_state import TrainingState

MIN_SECONDS = 60.0
"""Length of a training from which its step is planned: a plan takes a second or two, which is then a small part."""


def planned_peak(training: TrainingState) -> int | None:
    """Return the planned peak bytes of a step.

    Returns:
        None for a training of less than a minute, one on several ranks or a compiled one, which the plan leaves out,
        and for a step that cannot be planned without running it.
    """
    config = training.config
    if training.progress.elapsed_s < MIN_SECONDS or training.ranks or config.train.compile:
        return None

    def changed(changes: Mapping[str, Any]) -> Config:
        made = config
        for key, value in changes.items():
            section, name = key.split(".")
            made = made.model_copy(update={section: getattr(made, section).model_copy(update={name: value})})
        return made

    try:
        return ConfigPlanner(changed, splits=training.splits).traced().peak_bytes
    except Exception:  # a model of the user may raise anything, and its training is complete without a plan
        return None
