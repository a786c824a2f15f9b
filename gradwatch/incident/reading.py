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
from gradwatch.records import Finding
from gradwatch.state import checkpoint_folder
from gradwatch.state.checkpoint_folder import DamagedError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """What was written when something critical was found.

    Args:
        path: Its folder.
        step: The step that it is about.
        findings: What was found there, at that time.
        facts: What `incident.json` says besides: `snapshot` (the step before which the kept state was taken, or None),
            `epoch` and `batch` (where the step's first batch stands in the data), `samples` (indices of its samples, a
            list for each micro-batch), `weights` (the step before which the weights were hashed, and the hash),
            `machine` (what the numbers depend on beside the config).
    """

    path: Path
    step: int
    findings: tuple[Finding, ...]
    facts: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the facts of an incident.

        Raises:
            RunError: It is none, or a newer gradwatch wrote it.
        """
        try:
            data = json.loads((path / FACTS).read_bytes())
            if data.pop("format") > FORMAT:
                raise RunError(f"{path}: this incident was written by a newer gradwatch: update gradwatch")
            found = tuple(FINDINGS.decode(finding) for finding in data.pop("findings"))
            return cls(path=path, step=int(data.pop("step")), findings=found, facts=data)
        except RunError:
            raise
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RunError(f"{path}: cannot read an incident here ({type(error).__name__}: {error})") from error

    @property
    def snapshot_step(self) -> int | None:
        """The step before which the kept state was taken, or None where no state could be kept."""
        found = self.facts.get("snapshot")
        return None if found is None else int(found)

    def state(self) -> dict[str, Any]:
        """Read all that was kept: `snapshot` (a training's state, or None), `window` (the batches) and `rows`.

        Raises:
            CheckpointError: It is damaged.
        """
        try:
            return checkpoint_folder.read(self.path)
        except DamagedError as error:
            raise CheckpointError(f"{self.path} is damaged: {error}") from error


def incidents(run: str | Path) -> tuple[Incident, ...]:
    """Return the incidents of a run directory, by step; one that cannot be read is named in a warning."""
    found = []
    for path in sorted((Path(run) / FOLDER).glob("step-*")):
        if path.suffix:  # unfinished
            continue
        try:
            found.append(Incident.read(path))
        except RunError as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
    return tuple(sorted(found, key=lambda incident: incident.step))
