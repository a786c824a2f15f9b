"""Act on a critical finding: stop, skip its batches from now on, or rewind to the last good state."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from gradwatch.errors import CheckpointError
from gradwatch.events import BATCH_LEFT_OUT, INCIDENT, LEFT_OUT, NOT_RECORDED, REWIND
from gradwatch.records import Event, Finding
from gradwatch.state.rng import set_random_state
from gradwatch.train import checkpoint
from gradwatch.train.data_position import Position, numbered
from gradwatch.train.recovery.incidents import keep, position_of
from gradwatch.train.session import Session

LEARNING_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "base_lr")
"""Keys of an optimizer's groups that torch's schedules read their learning rates from."""
MAX_WARNINGS = 5
"""Maximum number of skipped batches that get a warning each; if there are many, the batches are not the cause."""
SURVIVING = {kind.name for kind in (REWIND, INCIDENT, BATCH_LEFT_OUT, LEFT_OUT, NOT_RECORDED)}
"""Events that stay in the history after a rewind to a step before them."""


def recover(session: Session, findings: Sequence[Finding]) -> bool:
    """Act on critical findings as `train.on_critical` says.

    Args:
        session: The training, between two steps.
        findings: The critical findings; empty if the last step was not finite, which had been found before.

    Returns:
        Whether the training must end.

    Raises:
        CheckpointError: A rewind is necessary, but there is no state to go back to.
    """
    train, progress = session.config.train, session.progress
    if train.on_critical == "continue":
        return False
    if train.on_critical == "stop":
        return True
    step = min([finding.step for finding in findings], default=progress.step - 1)
    why = findings[0].message if findings else "the loss or a gradient was not finite"
    # before a rewind moves the progress: the batches of the critical step are the ones to skip
    position = position_of(session.training, step, since=(_kept(session, step) or {}).get("progress"))
    if train.on_critical == "skip":
        _leave_out(session, position)
        _emit(session, BATCH_LEFT_OUT.emit(step=step, culprit=step, reason=why), times=len(progress.bad))
        return False
    if progress.rewinds >= train.rewind.limit:
        action = f", after {progress.rewinds} rewinds: the training ends"
        _emit(session, REWIND.emit(step=step, culprit=step, reason=why, action=action))
        return True
    _rewind(session, step, why, position)
    return False


def _rewind(session: Session, step: int, why: str, position: Position) -> None:
    """Rewind to the last good state, apply the remedy of the config, and save the result as a checkpoint."""
    settings, progress = session.config.train.rewind, session.progress
    state = _kept(session, step) or _saved(session, step)
    rewinds, bad = progress.rewinds + 1, progress.bad  # loading the state replaces both in `progress`
    done = f"its batch is left out ({rewinds} of {settings.limit} rewinds)"
    session.training.load(state)
    session.remember(state)
    # bad steps after this position run again, so their batches are skipped from here at the latest
    here = [progress.epoch, progress.batch]
    progress.rewinds, progress.bad = rewinds, [[*known[:3], *min(known[3:], here)] for known in bad]
    if settings.remedy == "skip":
        _leave_out(session, position)
    else:
        # a state from before an earlier rewind still has the learning rate of that time
        scale_learning_rates(session, settings.lr_factor ** (rewinds - state["progress"].get("rewinds", 0)))
        done = f"the learning rate is multiplied by {settings.lr_factor:g} ({rewinds} of {settings.limit} rewinds)"
    set_random_state(state["random"])
    session.rewind(surviving=SURVIVING)
    action = f"; went back to step {progress.step}, {done}"
    _emit(session, REWIND.emit(step=progress.step, culprit=step, reason=why, action=action))
    session.save(best=False)  # so that a resume after a kill does not continue from the abandoned steps
    if session.recorder:
        keep(session)  # later incidents are replayed from the snapshot, and the old one lacks the remedy


def scale_learning_rates(session: Session, factor: float) -> None:
    """Multiply every learning rate, the current and the scheduled ones."""
    for group in session.optimizer.param_groups:
        for key in LEARNING_RATES:
            if key in group:
                group[key] = group[key] * factor
    _scale_schedule(session.schedule, factor)


def _scale_schedule(schedule: Any, factor: float) -> None:
    if schedule is None:
        return
    for name in ("base_lrs", "max_lrs", "_last_lr", "min_lrs"):
        if hasattr(schedule, name):
            setattr(schedule, name, [lr * factor for lr in getattr(schedule, name)])
    for part in getattr(schedule, "_schedulers", ()):  # SequentialLR and ChainedScheduler
        _scale_schedule(part, factor)


def _kept(session: Session, step: int) -> dict[str, Any] | None:
    """Return the snapshot in memory, or None if there is none from before a step."""
    recorder = session.recorder
    if recorder is None or recorder.step is None or recorder.step > step:
        return None
    state: dict[str, Any] = recorder.read()
    return state


def _saved(session: Session, step: int) -> dict[str, Any]:
    """Return the newest checkpoint from before a step."""
    root = session.directory / "checkpoints"
    for number in sorted(checkpoint.steps(root), reverse=True):
        if number <= step:  # checkpoint N is the state before step N
            return session.saved_state(number)
    raise CheckpointError(
        f"train.on_critical: step {step} needs a rewind, but there is no earlier state to go back to: no checkpoint, "
        "and no copy in memory; raise watch.record.memory_mb, or set train.checkpoint.every"
    )


def _leave_out(session: Session, position: Position) -> None:
    """Mark a step as bad: its batches are skipped from the current position on."""
    progress = session.progress
    progress.bad = [*progress.bad, [*position.identity(numbered(session.batches)), progress.epoch, progress.batch]]


def _emit(session: Session, event: Event, *, times: int = 0) -> None:
    """Add an event, and warn about it unless there were more than `MAX_WARNINGS` of its kind."""
    session.pipeline.add_event(event)
    if times <= MAX_WARNINGS:
        more = "; further skipped batches are recorded without a warning" if times == MAX_WARNINGS else ""
        warnings.warn(f"gradwatch: {event.text}{more}", RuntimeWarning, stacklevel=2)
