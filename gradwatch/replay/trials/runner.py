"""Train changed configs of a run until a deadline, each once and just long enough to see the finding."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import numpy as np

from gradwatch.history.store import History
from gradwatch.records import Finding
from gradwatch.replay.config_change import config_of
from gradwatch.replay.restore.warm_start import WarmStart, find_warm_start
from gradwatch.replay.trials.trial_run import TrialRun, run_trial, same_problem, threads_for

STEPS_AFTER = 40
"""Number of steps to train after a finding: a symptom must stay away, and detectors wait before they report."""
MIN_TRIAL_STEPS = 30
"""Minimum number of steps of a trial: most detectors need several steps before their first check."""
FOUND_AT_ONCE = ("non-finite", "gradient-spike")
"""Kinds that are found at the step where they occur; all other problems may begin earlier."""
WHOLE_RUN_FACTOR = 1.5
"""Maximum ratio of the whole run to the needed steps. Up to this ratio, the whole run is trained, as for a cure."""

Progress = Callable[[str], None]
"""Function that is called with a short text before each part of a search that may take long."""


def no_progress(text: str) -> None:
    """Show no progress."""


@final
class TrialRunner:
    """Trains changed configs of a run, each once, until a deadline.

    Args:
        run: The run directory.
        history: Recorded history of the run.
        deadline: Time of `time.perf_counter` after which no trial may end, in seconds.
        progress: Shows the trial in progress.
    """

    def __init__(self, run: Path, history: History, *, deadline: float, progress: Progress = no_progress) -> None:
        self.run = run
        self.history = history
        self.threads = threads_for(history)
        self.progress = progress
        self._deadline = deadline
        self._made: dict[tuple[str, int, int], TrialRun] = {}

    def warm_start(self, finding: Finding) -> WarmStart | None:
        """Find the newest recorded state before a problem began; None if only the start of the run qualifies."""
        kinds = same_problem(finding.kind)
        began = min((f.step for f in self.history.findings if f.kind in kinds), default=finding.step)
        # a finding may be reported up to STEPS_AFTER steps after its problem began
        latest = began if finding.kind in FOUND_AT_ONCE else began - STEPS_AFTER
        return find_warm_start(self.run, latest)

    def run_trial(self, patch: dict[str, Any], *, steps: int, warm_start: WarmStart | None = None) -> TrialRun | None:
        """Train the config of the run with a change; return None if there is not enough time left.

        Args:
            patch: The change.
            steps: The step before which to end.
            warm_start: State at which to begin; None for the start of the run.
        """
        start_step = warm_start.step if warm_start else 0
        # as text, since the values of a patch may be unhashable
        key = (repr(sorted(patch.items())), start_step, steps)
        if key not in self._made:
            if time.perf_counter() + self._estimate_s(steps - start_step) > self._deadline:
                return None
            config = config_of(self.run, patch)
            self._made[key] = run_trial(config, steps=steps, threads=self.threads, warm_start=warm_start)
        return self._made[key]

    def _estimate_s(self, steps: int) -> float:
        """Estimate the time of a trial from the earlier trials, or else from the recorded steps of the run."""
        made = list(self._made.values())
        if made:
            # the slowest trial counts, because a trial that takes longer than estimated would miss the deadline
            return max(r.seconds / max(r.steps, 1) for r in made) * steps
        step_ms_T = self.history["step_ms"]
        known_T = step_ms_T[np.isfinite(step_ms_T)]
        return float(np.median(known_T)) / 1e3 * steps if len(known_T) else 0.0

    def steps_for(self, finding: Finding) -> int:
        """Return the number of steps that shows whether a finding recurs: the whole run, if that is not much longer."""
        enough, whole = max(finding.step + STEPS_AFTER, MIN_TRIAL_STEPS), max(self.history.step + 1, 1)
        return whole if whole <= WHOLE_RUN_FACTOR * enough else enough
