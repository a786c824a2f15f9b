"""Plan the memory of a training that has ended, to compare the plan with the measured peak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradwatch.config.sections.root import Config
from gradwatch.planning.training import ConfigPlanner
from gradwatch.train.training_state import TrainingState

MAX_SHARE = 0.05
"""Maximum time of a plan, as a fraction of the time of the training."""
LOADING_S, SECONDS_PER_TENSOR = 0.5, 0.05
"""Time to load the planner, and of a plan for each parameter: 14 to 51 ms for the shipped configs, on one core."""


def planned_peak(training: TrainingState) -> int | None:
    """Return the planned peak bytes of a step.

    Returns:
        None for a training so short that planning would delay its end by more than `MAX_SHARE`, one on several ranks
        or a compiled one, which the plan leaves out, and for a step that cannot be planned without running it.
    """
    config = training.config
    cost_s = LOADING_S + SECONDS_PER_TENSOR * sum(1 for _ in training.model.parameters())
    if training.progress.elapsed_s * MAX_SHARE < cost_s or training.ranks or config.train.compile:
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
