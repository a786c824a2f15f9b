"""Audit the step that the command line names: of a script, a config or a recorded run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, replace

from gradwatch.gradcheck.audit.audit import run_audit
from gradwatch.gradcheck.audit.result import StepAudit
from gradwatch.gradcheck.audit.script import audit_script
from gradwatch.gradcheck.options import CheckTarget
from gradwatch.gradcheck.training_steps import training_step
from gradwatch.train.loop import move_schedule
from gradwatch.train.step import Batch, to_device
from gradwatch.train.training_state import TrainingState


def audit_target(target: CheckTarget, *, allow: Collection[str]) -> StepAudit:
    """Audit the updates of a script, or the first step of a config, or a step of a run from its restored state.

    Args:
        target: The script, config or run to audit.
        allow: Kinds of differences that are on purpose.
    """
    if target.kind == "script":
        return audit_script(target.path, target.arguments, allow=allow)
    with training_step(target) as (training, window, notes):
        return replace(_audit_training(training, window, allow=allow), notes=notes)


def _audit_training(training: TrainingState, window: list[Batch], *, allow: Collection[str]) -> StepAudit:
    """Audit a step of the training loop: the passes, the update, and the schedule."""
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
