"""Read the incidents of a run."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

from gradwatch.errors import CheckpointError, RunError
from gradwatch.history.disk.findings import FINDINGS
from gradwatch.incident.writing import FACTS, FOLDER, FORMAT
from gradwatch.paths import user_path
from gradwatch.records import Finding
from gradwatch.state import checkpoint_folder
from gradwatch.state.checkpoint_folder import DamagedError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Hold the facts that were written after a critical finding.

    Args:
        path: Folder of the incident.
        step: Optimizer step with the finding.
        findings: Findings of this step that were known at the time of writing.
        facts: Further entries of `incident.json`: `snapshot` (the step before which the saved state was copied, or
            None), `epoch` and `batch` (position of the step's first batch in the data), `samples` (indices of its
            samples, a list for each micro-batch), `weights` (the step before which the weights were hashed, and the
            hash), `machine` (settings other than the config that the numbers depend on).
    """

    path: Path
    step: int
    findings: tuple[Finding, ...]
    facts: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the facts of an incident.

        Raises:
            RunError: The folder holds no incident, or a newer gradwatch wrote it.
        """
        try:
            data = json.loads((path / FACTS).read_bytes())
            if data.pop("format") > FORMAT:
                raise RunError(f"{path}: this incident was written by a newer gradwatch: update gradwatch")
            found = tuple(FINDINGS.decode(finding) for finding in data.pop("findings"))
            # `data` now holds only the entries without a field
            return cls(path=path, step=int(data.pop("step")), findings=found, facts=data)
        except RunError:  # a ValueError too: its text is already complete
            raise
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RunError(f"{path}: cannot read an incident here ({type(error).__name__}: {error})") from error

    @property
    def snapshot_step(self) -> int | None:
        """Step before which the saved state was copied, or None if no state was saved."""
        found = self.facts.get("snapshot")
        return None if found is None else int(found)

    def state(self) -> dict[str, Any]:
        """Read the saved state: `snapshot` (state of the training, or None), `window` (the batches) and `rows`.

        Raises:
            CheckpointError: The incident is damaged.
        """
        try:
            return checkpoint_folder.read(self.path)
        except DamagedError as error:
            raise CheckpointError(f"{self.path} is damaged: {error}") from error


def incidents(run: str | Path) -> tuple[Incident, ...]:
    """Read the incidents of a run directory, sorted by step. Warn about each incident that cannot be read."""
    found = []
    for path in sorted((user_path(run) / FOLDER).glob("step-*")):
        if path.suffix:  # `.tmp`: the process ended while writing
            continue
        try:
            found.append(Incident.read(path))
        except RunError as error:  # one damaged incident must not hide the others
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
    # by number: names have 6 digits, so as text step-1000000 comes before step-999999
    return tuple(sorted(found, key=lambda incident: incident.step))
