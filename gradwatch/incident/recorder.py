"""Keep a recent state of a training in host memory, and write it down when something critical is found.

Two ways to be able to run a step again were measured (`scripts/benchmarks/record.py`). Holding back, that is noting
down the random generators before every step and leaving out the bad update, takes 47 us a step for the generators of
Python, NumPy and torch alone, a tenth of a small step, and only serves findings that are known before the update. A
copy of everything takes 0.2 ms for a small model, 30 ms for ResNet-18 with AdamW (128 MB, a step takes 134 ms), once in
`every` steps and at most once a second; it serves every finding, and the steps since then are run again, which on one
machine gives the very same bits. So that is what is done; its price is the memory of one copy.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from gradwatch.errors import GradwatchError
from gradwatch.incident import writing
from gradwatch.records import Finding, Severity
from gradwatch.state.snapshot import Snapshot, num_bytes

NON_FINITE = "non-finite"
MEGABYTE = 1 << 20
NEVER = sys.maxsize
REST_S = 1.0
"""A copy of a model takes as long as a fraction of its step; of a small one, mostly Python: 0.2 ms at a time."""


def warrants_incident(finding: Finding) -> bool:
    """Return whether a finding warrants an incident: critical, or NaN or Inf, even if the update was skipped."""
    return finding.severity >= Severity.CRITICAL or finding.kind == NON_FINITE


@final
class Snapshotter:
    """Keeps the newest snapshot of a training, and writes incidents from it.

    Args:
        directory: The run directory.
        every: Steps between two snapshots.
        rest_s: Seconds that are left between two snapshots at least, where steps are short; 0 for snapshots whose
            steps do not depend on the clock.
        memory_mb: Host memory that a snapshot may take; a training that needs more is not kept.
        most: Incidents of a run that are written.

    Attributes:
        due: The step at whose beginning the next snapshot is due.
        step: The step before which the kept snapshot was taken, or None.
    """

    def __init__(self, directory: Path, *, every: int, memory_mb: int, most: int, rest_s: float) -> None:
        self.due = 0
        self.step: int | None = None
        self._directory = directory
        self._every = every
        self._limit = memory_mb * MEGABYTE
        self._left = most
        self._rest_s = rest_s
        self._taken_at = -math.inf
        self._snapshot = Snapshot()

    def is_rested(self, step: int) -> bool:
        """Return whether a due snapshot is taken; if the last one is too recent, it is postponed."""
        if time.monotonic() - self._taken_at >= self._rest_s:
            return True
        self.due = self._next(step)
        return False

    def keep(self, step: int, state: Any) -> str:
        """Copy the state before a step. Steps need not grow: a training may go back.

        Returns:
            Why nothing is kept, or an empty string.
        """
        self.step = None
        needed = num_bytes(state)
        if needed > self._limit:
            self.due = NEVER
            self._snapshot = Snapshot()
            return (
                f"a copy of model and optimizer takes {needed // MEGABYTE:,} MB, watch.record.memory_mb allows "
                f"{self._limit // MEGABYTE:,}: steps can be replayed from checkpoints only"
            )
        self._snapshot.take(state)
        self.step = step
        self.due = self._next(step)
        self._taken_at = time.monotonic()
        return ""

    def read(self) -> Any:
        """Return the kept state, or None. Its tensors change when the next one is kept."""
        return self._snapshot.read() if self.step is not None else None

    def _next(self, step: int) -> int:
        return step - step % self._every + self._every

    @property
    def is_full(self) -> bool:
        """Whether no further incident would be written."""
        return self._left <= 0

    def write(self, *, step: int, findings: Sequence[Finding], facts: Mapping[str, Any], state: Any) -> Path | None:
        """Write an incident, unless there are enough of them already. Where that fails, it warns once and is given up.

        Args:
            step: The step that it is about.
            findings: What was found there.
            facts: Plain data that a person may read: see `Incident`.
            state: Tree of all that it takes to run the step again.

        Returns:
            The incident's folder, or None where none was written.
        """
        if self.is_full:
            return None
        self._left -= 1
        try:
            return writing.write(self._directory, step=step, findings=findings, facts=facts, state=state)
        except (OSError, GradwatchError) as error:
            self.give_up(error)
            return None

    def give_up(self, error: Exception) -> None:
        """Keep and write nothing any more, and say why: the training is worth more."""
        self._left, self.due, self.step = 0, NEVER, None
        self._snapshot = Snapshot()
        reason = (error.strerror or "").lower() if isinstance(error, OSError) else str(error)
        text = f"no more incidents are saved, the training continues: {reason or str(error) or type(error).__name__}"
        warnings.warn(f"gradwatch: {text}", RuntimeWarning, stacklevel=3)
