"""Audit the step that the command line names: the first one of a config, or a recorded one of a run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from gradwatch.gradcheck.audit.audit import run_audit
from gradwatch.gradcheck.audit.result import StepAudit
from gradwatch.gradcheck.training_steps import first_step, recorded_step
from gradwatch.train.loop import move_schedule
from gradwatch.train.step import Batch, to_device
from gradwatch.train.training_state import TrainingState


def audit_config(file: Path, overrides: Sequence[str], *, allow: Collection[str]) -> StepAudit:
    """Audit the first step of the training that a config describes, without starting a run."""
    with first_step(file, overrides) as (training, window):
        return _audit_training(training, window, allow=allow)


def audit_run(run: Path, step: int | None, *, allow: Collection[str]) -> StepAudit:
    """Audit a step of a recorded run, from its restored state and its own batch.

    Args:
        run: The run directory.
        step: The step, or None for the one after the newest checkpoint.
        allow: Kinds of differences that are on purpose.
    """
    with recorded_step(run, step) as (number, training, window):
        return replace(_audit_training(training, window, allow=allow), notes=(f"step {number} of {run}",))


def _audit_training(training: TrainingState, window: list[Batch], *, allow: Collection[str]) -> StepAudit:
    """Audit a step as the training loop makes it: the passes, the update, and the schedule."""
    stepper, start = training.stepper(), asdict(training.progress)

    def step(*micro_batches: Batch) -> None:
        training.progress.update(start)
        result = stepper.run(micro_batches)
        training.advance(len(micro_batches))
        move_schedule(training, result, None)

    return run_audit(
        step,
        tuple(to_device(batch, training.device) for batch in window),
        model=training.model,
        optimizer=training.optimizer,
        reached=(training.scaler, training.schedule, training.objective.function),
        allow=allow,
    )
