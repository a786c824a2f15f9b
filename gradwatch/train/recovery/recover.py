"""What a training does when something critical was found: stop, leave out the batch from now on, or go back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from gradwatch.errors import CheckpointError
from gradwatch.events import BATCH_LEFT_OUT, INCIDENT, NOT_RECORDED, REWIND
from gradwatch.records import Event, Finding
from gradwatch.state.rng import set_random_state
from gradwatch.train import checkpoint
from gradwatch.train.data_position import Position
from gradwatch.train.recovery.incidents import keep, position_of
from gradwatch.train.session import Session

LEARNING_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "base_lr")
"""Keys of an optimizer's groups from which torch's schedules take their learning rates."""
MAX_WARNINGS = 5
"""Batches left out that are warned of one by one: where there are many, it is not the batches."""
SURVIVING = {kind.name for kind in (REWIND, INCIDENT, BATCH_LEFT_OUT, NOT_RECORDED)}
"""Events that stay in the history when the steps that led to them are taken back."""


def recover(session: Session, findings: Sequence[Finding]) -> bool:
    """Do what `train.on_critical` says.

    Args:
        session: The training, between two steps.
        findings: What was found; empty where the last step was not finite and that is no news.

    Returns:
        Whether the training is to end.
    """
    train, progress = session.config.train, session.progress
    if train.on_critical == "continue":
        return False
    if train.on_critical == "stop":
        return True
    step = min([finding.step for finding in findings], default=progress.step - 1)
    why = findings[0].message if findings else "the loss or a gradient was not finite"
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
    """Go back to the last good state, mend what the config says, and make that the state to resume from."""
    settings, progress = session.config.train.rewind, session.progress
    state = _kept(session, step) or _saved(session, step)
    rewinds, bad = progress.rewinds + 1, progress.bad
    done = f"its batch is left out ({rewinds} of {settings.limit} rewinds)"
    session.training.load(state)
    session.remember(state)
    here = [progress.epoch, progress.batch]
    progress.rewinds, progress.bad = rewinds, [[*known[:3], *min(known[3:], here)] for known in bad]
    if settings.remedy == "skip":
        _leave_out(session, position)
    else:
        # the state may be one from before an earlier rewind, at the learning rate of that time
        scale_learning_rates(session, settings.lr_factor ** (rewinds - state["progress"].get("rewinds", 0)))
        done = f"the learning rate is multiplied by {settings.lr_factor:g} ({rewinds} of {settings.limit} rewinds)"
    set_random_state(state["random"])
    session.rewind(surviving=SURVIVING)
    action = f"; went back to step {progress.step}, {done}"
    _emit(session, REWIND.emit(step=progress.step, culprit=step, reason=why, action=action))
    session.save(best=False)  # so that a kill from here on does not bring the steps back that were taken back
    if session.recorder:
        keep(session)  # what was kept knows nothing of what was mended, and an incident to come is run again from it


def scale_learning_rates(session: Session, factor: float) -> None:
    """Multiply every learning rate, now and as scheduled."""
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
    for part in getattr(schedule, "_schedulers", ()):
        _scale_schedule(part, factor)


def _kept(session: Session, step: int) -> dict[str, Any] | None:
    """Return the kept state, where it is one from before a step."""
    recorder = session.recorder
    if recorder is None or recorder.step is None or recorder.step > step:
        return None
    state: dict[str, Any] = recorder.read()
    return state


def _saved(session: Session, step: int) -> dict[str, Any]:
    """Return the newest checkpoint from before a step."""
    root = session.directory / "checkpoints"
    for number in sorted(checkpoint.steps(root), reverse=True):
        if number <= step:
            return checkpoint.load(root, step=number)[1]
    raise CheckpointError(
        f"train.on_critical: step {step} calls for a rewind, and there is no state from before it to go back to: "
        "no checkpoint, and no copy in memory; raise watch.record.memory_mb, or set train.checkpoint.every"
    )


def _leave_out(session: Session, position: Position) -> None:
    """Leave out the batches of a step from here on."""
    progress = session.progress
    progress.bad = [*progress.bad, [*position.identity(session.batches), progress.epoch, progress.batch]]


def _emit(session: Session, event: Event, *, times: int = 0) -> None:
    """Note an event, and warn of it unless it has been so often that a warning says nothing new."""
    session.pipeline.add_event(event)
    if times <= MAX_WARNINGS:
        more = "; further ones are noted without a warning" if times == MAX_WARNINGS else ""
        warnings.warn(f"gradwatch: {event.text}{more}", RuntimeWarning, stacklevel=2)
