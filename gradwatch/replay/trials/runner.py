"""Train changed configs of a run, each once and just long enough to see the finding, until a deadline."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, final

import numpy as np

from gradwatch.history.store import History
from gradwatch.records import Finding
from gradwatch.replay.config_change import config_of
from gradwatch.replay.restore.warm_start import WarmStart, find_warm_start
from gradwatch.replay.trials.trial_run import TrialRun, run_trial, same_illness, threads_for

STEPS_AFTER = 40
"""Steps to go on after a finding: what is gone must stay away, and detectors wait before they are sure."""
MIN_TRIAL_STEPS = 30
"""Steps of a trial at least: most detectors need some steps before they check the first ones."""
FOUND_AT_ONCE = ("non-finite", "gradient-spike")
"""Kinds that are found at the step at which they are; all others may have begun before."""
WHOLE_RUN_FACTOR = 1.5
"""Factor up to which the whole run is trained instead of just enough steps: a cure is trained that long."""


@final
class TrialRunner:
    """Trains changed configs of a run, each once, until a deadline.

    Args:
        run: The run directory.
        history: What it recorded.
        deadline: Of `time.perf_counter`.
    """

    def __init__(self, run: Path, history: History, *, deadline: float) -> None:
        self.run = run
        self.history = history
        self.threads = threads_for(history)
        self._deadline = deadline
        self._made: dict[tuple[str, int, int], TrialRun] = {}

    def warm_start(self, finding: Finding) -> WarmStart | None:
        """Return the recorded state nearest before an illness began, or None where only the start is."""
        kinds = same_illness(finding.kind)
        began = min((f.step for f in self.history.findings if f.kind in kinds), default=finding.step)
        latest = began if finding.kind in FOUND_AT_ONCE else began - STEPS_AFTER
        return find_warm_start(self.run, latest)

    def run_trial(self, patch: dict[str, Any], *, steps: int, warm_start: WarmStart | None = None) -> TrialRun | None:
        """Return the run's training with a change, or None where there is no time left for it.

        Args:
            patch: The change.
            steps: The step before which to end.
            warm_start: The state to begin at; None is the start.
        """
        start_step = warm_start.step if warm_start else 0
        key = (repr(sorted(patch.items())), start_step, steps)
        if key not in self._made:
            if time.perf_counter() + self._estimate_s(steps - start_step) > self._deadline:
                return None
            config = config_of(self.run, patch)
            self._made[key] = run_trial(config, steps=steps, threads=self.threads, warm_start=warm_start)
        return self._made[key]

    def _estimate_s(self, steps: int) -> float:
        """Return how long a trial will take, judging by the last ones, else by the run's own steps."""
        made = list(self._made.values())
        if made:
            return max(r.seconds / max(r.steps, 1) for r in made) * steps
        step_ms_T = self.history["step_ms"]
        known_T = step_ms_T[np.isfinite(step_ms_T)]
        return float(np.median(known_T)) / 1e3 * steps if len(known_T) else 0.0

    def steps_for(self, finding: Finding) -> int:
        """Return the step until which to train to see whether a finding comes back: the run's end, where it is near."""
        enough, whole = max(finding.step + STEPS_AFTER, MIN_TRIAL_STEPS), max(self.history.step + 1, 1)
        return whole if whole <= WHOLE_RUN_FACTOR * enough else enough
