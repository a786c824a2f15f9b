"""End a training whose metric no longer improves, and keep that ending when the run is resumed."""

from __future__ import annotations

import math
import warnings

from gradwatch.config.sections.root import Config
from gradwatch.config.sections.train import EarlyStopSection
from gradwatch.history.ending import Ending
from gradwatch.train.evaluate import Evaluation
from gradwatch.train.session import Session
from gradwatch.train.step import StepResult
from gradwatch.train.training_state import Progress


def count(session: Session, result: StepResult, evaluation: Evaluation) -> None:
    """Count the evaluations since the metric has improved, at each evaluation."""
    stop, progress = session.config.train.early_stop, session.progress
    if stop is None:
        return
    metric = {"val_loss": evaluation.loss, "val_accuracy": -evaluation.accuracy, "loss": result.loss}[stop.metric]
    # the first evaluation always counts as an improvement, even with a metric of inf or nan; any number beats nan
    is_first = math.isinf(progress.best) or (math.isnan(progress.best) and not math.isnan(metric))
    improved = is_first or metric < progress.best - stop.min_delta
    progress.best, progress.stale = (metric, 0) if improved else (progress.best, progress.stale + 1)


def ending(session: Session) -> Ending | None:
    """Return the ending if the metric has not improved for `patience` evaluations, or None."""
    stop, progress = session.config.train.early_stop, session.progress
    if stop is None or progress.stale < stop.patience or progress.step == session.total_steps:
        return None
    return Ending(kind="early-stop", reason=_reason(stop, progress.stale))


def resumed_ending(session: Session, *, then: Config) -> Ending | None:
    """Return the ending of a resumed run that early stopping ended, and warn how to continue it; or return None.

    Args:
        session: The resumed run, before its next step.
        then: The run's config so far. If its criterion was different, the count begins again.
    """
    _restart_count(session.progress, then, session.config)
    ended = ending(session)
    if ended:
        warnings.warn(
            f"the run {ended.sentence(session.progress.step)}; to continue, resume it with --set train.early_stop=null",
            stacklevel=2,
        )
    return ended


def _restart_count(progress: Progress, then: Config, now: Config) -> None:
    old, new = then.train.early_stop, now.train.early_stop
    if new is None or (old and (old.metric, old.min_delta) == (new.metric, new.min_delta)):
        return  # a changed patience keeps the count
    progress.stale = 0
    if old is None or old.metric != new.metric:
        progress.best = math.inf


def _reason(stop: EarlyStopSection, stale: int) -> str:
    least = f" by {stop.min_delta:g}" if stop.min_delta else ""
    return f"{stop.metric} has not improved{least} for {stale} evaluation{'' if stale == 1 else 's'}"
