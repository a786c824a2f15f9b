"""Train a config for some steps in a temporary folder, with detectors and without output."""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.config.sections.root import Config
from gradwatch.history.ending import Ending
from gradwatch.history.store import History
from gradwatch.records import Finding, Severity
from gradwatch.replay.restore.restored_session import isolated_process, run_until
from gradwatch.replay.restore.warm_start import WarmStart
from gradwatch.train.evaluate import evaluate
from gradwatch.train.recovery import failures
from gradwatch.train.reproducible import seed_all
from gradwatch.train.session import Session

NON_FINITE = ("non-finite", "loss-scale-collapse")
"""Kinds of findings that result from values that are not finite."""
SHORT_STEP_MS = 20.0
"""Time of a step, in milliseconds, below which a second thread does not pay off."""
NEVER_STEPS = 10**9
"""Interval of checkpoints that is never reached."""
TAIL_FRAC = 0.1
"""Fraction of the steps at the end that the final loss is the mean of."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRun:
    """The result of a trial.

    Args:
        history: Recorded history, including the steps before a recorded state.
        val_loss: Final validation loss; nan without validation data.
        val_accuracy: Final fraction of correctly predicted validation labels; nan without labels.
        seconds: Duration of the trial in seconds.
        start_step: First step of the trial: 0, or the step of a recorded state.
    """

    history: History
    val_loss: float
    val_accuracy: float
    seconds: float
    start_step: int = 0

    @property
    def steps(self) -> int:
        """Number of optimizer steps of the trial."""
        return self.history.step + 1 - self.start_step

    @property
    def loss(self) -> float:
        """Mean training loss of the last 10 % of the steps; nan or inf if one of these losses is."""
        return final_loss(self.history, since=self.start_step)

    @property
    def alarms(self) -> list[Finding]:
        """Findings of severity WARNING or higher, in the order of steps."""
        found = [f for f in self._made() if f.severity >= Severity.WARNING]
        return sorted(found, key=lambda f: f.step)

    def found(self, finding: Finding) -> list[Finding]:
        """Return the findings of the same problem that are at least as severe as a warning, or as this finding."""
        least = min(finding.severity, Severity.WARNING)
        kinds = same_problem(finding.kind)
        return [f for f in self._made() if f.kind in kinds and f.severity >= least]

    def _made(self) -> list[Finding]:
        # with a warm start, the history also has the findings of the run before it
        return [f for f in self.history.findings if f.step >= self.start_step]


def same_problem(kind: str) -> tuple[str, ...]:
    """Return the kinds of findings that are signs of the same problem as a kind."""
    # with a loss scaler, NaN in the gradients shows as a falling loss scale
    return NON_FINITE if kind in NON_FINITE else (kind,)


def final_loss(history: History, *, since: int = 0) -> float:
    """Return the mean training loss of the last 10 % of a history, counted from step `since`."""
    losses_T: NDArray[Any] = history["loss"][history.steps("loss") >= since]
    tail_T = losses_T[-max(1, math.ceil(TAIL_FRAC * len(losses_T))) :]
    return float(np.mean(tail_T)) if len(tail_T) else math.nan


def threads_for(history: History) -> int | None:
    """Return the number of threads for the trials of a run: 1 for short steps; None for torch's default."""
    # short steps would spend their time in the synchronization of threads
    step_ms_T = history["step_ms"]
    known_T = step_ms_T[np.isfinite(step_ms_T)]
    return 1 if len(known_T) and float(np.median(known_T)) < SHORT_STEP_MS else None


def run_trial(
    config: Config, *, steps: int, threads: int | None = None, warm_start: WarmStart | None = None
) -> TrialRun:
    """Train a config in a temporary folder.

    Args:
        config: Config to train, without checkpoints, sinks, incidents and compilation.
        steps: The step before which to end, counted from the start of the run. The schedule keeps its full length.
        threads: Number of CPU threads if the config does not set it.
        warm_start: State at which to begin; None for the start of the run.
    """
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(isolated_process(config, threads=threads))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the run itself has already shown them
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradwatch-")))
        session, val_loss, val_accuracy = _trained(_quiet(config, folder), folder, steps, warm_start, stack)
        session.close(Ending(kind="finished"))
        history = session.pipeline.history
    seconds = time.perf_counter() - began
    start_step = warm_start.step if warm_start else 0
    return TrialRun(
        history=history, val_loss=val_loss, val_accuracy=val_accuracy, seconds=seconds, start_step=start_step
    )


def _trained(
    config: Config, folder: Path, steps: int, warm_start: WarmStart | None, stack: contextlib.ExitStack
) -> tuple[Session, float, float]:
    seed_all(config.run.seed)  # before the session, which draws the initial weights
    stack.enter_context(failures.explained())
    session = warm_start.open(config, folder, stack=stack) if warm_start else Session(config, folder, stack=stack)
    run_until(session, steps)
    val_loss = val_accuracy = math.nan
    if session.validation:
        result = evaluate(session.stepper, session.validation)
        val_loss, val_accuracy = result.loss, result.accuracy
    session.training.end_workers()
    return session, val_loss, val_accuracy


def _quiet(config: Config, folder: Path) -> Config:
    """Return a config without checkpoints, incidents, sinks and compilation, for a run in a temporary folder."""
    # findings are only recorded: a trial neither stops at one nor rewinds
    train = config.train.model_copy(
        update={
            "compile": False,
            "on_critical": "continue",
            "checkpoint": config.train.checkpoint.model_copy(update={"every": NEVER_STEPS, "best": False}),
        }
    )
    # enabled even if the run was not watched: a trial is judged by its findings
    watch = config.watch.model_copy(
        update={"enabled": True, "record": config.watch.record.model_copy(update={"enabled": False})}
    )
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"out": folder}),
            "train": train,
            "watch": watch,
            "sinks": {"terminal": {"enabled": False}, "tensorboard": {"enabled": False}},
        }
    )
