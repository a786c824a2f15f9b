"""Rehearse changes of a run: each once, for as long as it takes to see an illness, until a deadline."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, final

import numpy as np

from gradwatch.history.store import History
from gradwatch.records import Finding
from gradwatch.replay.config_change import config_of
from gradwatch.replay.restore.warm_start import Midway, before
from gradwatch.replay.trials.trial_run import Rehearsal, rehearse, same_illness, threads_for

AFTER = 40
"""Steps to go on after a finding: what is gone must stay away, and detectors wait before they are sure."""
LEAST = 30
"""Steps of a rehearsal at least: most detectors look at the first of them only when there are some."""
AT_ONCE = ("non-finite", "gradient-spike")
"""Kinds that are found at the step at which they are; all others may have begun before."""
NEAR = 1.5
"""Factor up to which the whole run is trained in the place of what is enough: a cure is trained for that long."""


@final
class Theatre:
    """Rehearses changes of a run, each once, until a deadline.

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
        self._made: dict[tuple[str, int, int], Rehearsal] = {}
        self._midway: dict[int, Midway | None] = {}

    def midway(self, finding: Finding) -> Midway | None:
        """Return the recorded state nearest before an illness began, or None where only the start is."""
        kinds = same_illness(finding.kind)
        began = min((f.step for f in self.history.findings if f.kind in kinds), default=finding.step)
        latest = began if finding.kind in AT_ONCE else began - AFTER
        if latest not in self._midway:
            self._midway[latest] = before(self.run, latest)
        return self._midway[latest]

    def rehearse(self, patch: dict[str, Any], *, steps: int, midway: Midway | None = None) -> Rehearsal | None:
        """Return the run's training with a change, or None where there is no time left for it.

        Args:
            patch: The change.
            steps: The step before which to end.
            midway: The state to begin at; None is the start.
        """
        began_at = midway.step if midway else 0
        key = (repr(sorted(patch.items())), began_at, steps)
        if key not in self._made:
            if time.perf_counter() + self._estimate_s(steps - began_at) > self._deadline:
                return None
            config = config_of(self.run, patch)
            self._made[key] = rehearse(config, steps=steps, threads=self.threads, midway=midway)
        return self._made[key]

    def _estimate_s(self, steps: int) -> float:
        """Return how long a rehearsal will take: as the last ones did, else as the run's own steps."""
        made = list(self._made.values())
        if made:
            return max(r.seconds / max(r.steps, 1) for r in made) * steps
        step_ms_T = self.history["step_ms"]
        known_T = step_ms_T[np.isfinite(step_ms_T)]
        return float(np.median(known_T)) / 1e3 * steps if len(known_T) else 0.0

    def steps_for(self, finding: Finding) -> int:
        """Return the step until which to train to see whether a finding comes back: the run's end, where it is near."""
        enough, whole = max(finding.step + AFTER, LEAST), max(self.history.step + 1, 1)
        return whole if whole <= NEAR * enough else enough
