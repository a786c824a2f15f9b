"""Keep a recent state of a training in host memory, and write it to disk after a critical finding.

Two designs for rerunning a step were measured (`scripts/benchmarks/record.py`).

- Save the random generators before every step, and skip the bad update. The generators of Python, NumPy and torch
  alone take 47 us per step, 10 % of a small step. This design only covers findings that are known before the update.
- Copy the whole state once in `every` steps, and at most once per second. A copy takes 0.2 ms for a small model. For
  ResNet-18 with AdamW (128 MB, 134 ms per step) it takes 30 ms. This design covers every finding. The steps since the
  copy are run again, and on one machine the result is bit-identical.

The second design is used. It costs the memory of one copy.
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
"""Minimum time between snapshots, in seconds. A copy of a small model takes 0.2 ms, which is mostly Python overhead."""


def warrants_incident(finding: Finding) -> bool:
    """Return whether a finding is critical or is about NaN or Inf."""
    # NaN and Inf count at any severity: the finding is less severe if the update was skipped
    return finding.severity >= Severity.CRITICAL or finding.kind == NON_FINITE


@final
class Snapshotter:
    """Keep the newest snapshot of a training, and write incidents from it.

    Args:
        directory: The run directory.
        every: Steps between two snapshots.
        rest_s: Minimum time between two snapshots, in seconds; 0 to take snapshots at steps independent of the clock.
        memory_mb: Maximum host memory of a snapshot, in MB; a larger training is not copied.
        most: Maximum number of incidents to write.

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
        """Return whether to take a due snapshot. Postpone the snapshot if the last one is too recent."""
        if time.monotonic() - self._taken_at >= self._rest_s:
            return True
        self.due = self._next(step)
        return False

    def keep(self, step: int, state: Any) -> str:
        """Copy the state before a step. Steps may decrease, since a training can rewind.

        Returns:
            The reason if no copy was made, else an empty string.
        """
        self.step = None  # until the copy is complete
        needed = num_bytes(state)
        if needed > self._limit:
            self.due = NEVER
            self._snapshot = Snapshot()  # frees the memory of the previous copy
            return (
                f"a copy of model and optimizer takes {needed // MEGABYTE:,} MB, watch.record.memory_mb allows "
                f"{self._limit // MEGABYTE:,}: steps can be replayed from checkpoints only"
            )
        self._snapshot.take(state)
        self.step = step
        self.due = self._next(step)
        self._taken_at = time.monotonic()  # after the copy, so that a slow copy does not eat up the rest
        return ""

    def read(self) -> Any:
        """Return the snapshot, or None. The next snapshot overwrites its tensors."""
        return self._snapshot.read() if self.step is not None else None

    def _next(self, step: int) -> int:
        # a multiple of `every`, so that postponed snapshots keep to the same steps
        return step - step % self._every + self._every

    @property
    def is_full(self) -> bool:
        """Whether the maximum number of incidents is reached."""
        return self._left <= 0

    def write(self, *, step: int, findings: Sequence[Finding], facts: Mapping[str, Any], state: Any) -> Path | None:
        """Write an incident, unless the maximum number is reached. After a failure, warn and write no more incidents.

        Args:
            step: Optimizer step with the findings.
            findings: Findings of this step.
            facts: Plain data for a reader of `incident.json`: see `Incident`.
            state: Nested state that is needed to rerun the step.

        Returns:
            The folder of the incident, or None if none was written.
        """
        if self.is_full:
            return None
        self._left -= 1
        try:
            return writing.write(self._directory, step=step, findings=findings, facts=facts, state=state)
        except (OSError, GradwatchError) as error:  # a full disk, or a state that a file cannot hold
            self.give_up(error)
            return None

    def give_up(self, error: Exception) -> None:
        """Stop taking snapshots and writing incidents, and warn with the reason. The training continues."""
        self._left, self.due, self.step = 0, NEVER, None
        self._snapshot = Snapshot()  # frees the memory of the copy
        reason = (error.strerror or "").lower() if isinstance(error, OSError) else str(error)
        text = f"no more incidents are saved, the training continues: {reason or str(error) or type(error).__name__}"
        warnings.warn(f"gradwatch: {text}", RuntimeWarning, stacklevel=3)
