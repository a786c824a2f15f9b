"""Keep the open and the withdrawn findings of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

from gradwatch.records import Finding

MAX_WITHDRAWALS = 3
"""Maximum number of withdrawals per kind and layer, so that a symptom that comes and goes cannot fill the memory."""

OPEN: dict[str, Any] = {"withdrawn": None, "ended": None, "reason": ""}
"""Fields that make a finding open again."""


@final
class FindingLog:
    """The findings of a run, at most one open finding per kind and layer.

    Attributes:
        open: Open findings in the order of their reports.
        withdrawn: Withdrawn findings in the order of their withdrawals.
    """

    def __init__(self) -> None:
        self.open: list[Finding] = []
        self.withdrawn: list[Finding] = []
        self._index: dict[tuple[str, str | None], int] = {}

    def report(self, finding: Finding) -> bool:
        """Add a finding. For an open finding of the same kind and layer, only its severity may rise.

        Returns:
            Whether the finding was added.
        """
        i = self._index_of(finding)
        if i is None:
            self._index[finding.kind, finding.layer] = len(self.open)
            self.open.append(finding)
            return True
        earlier = self.open[i]
        if finding.severity > earlier.severity:
            self.open[i] = replace(finding, step=earlier.step, onset=min(earlier.since, finding.since))
        return finding.severity > earlier.severity

    def withdraw(self, finding: Finding) -> bool:
        """Move an open finding to the withdrawn ones.

        A symptom that comes and goes is withdrawn `MAX_WITHDRAWALS` times, and then stays open.

        Args:
            finding: The open finding, with the step, the end and the reason of its withdrawal.

        Returns:
            Whether the finding was open, and is withdrawn now.
        """
        key, i = (finding.kind, finding.layer), self._index_of(finding)
        if i is None or sum((f.kind, f.layer) == key for f in self.withdrawn) >= MAX_WITHDRAWALS:
            return False
        del self.open[i]
        self._index.clear()  # `_index_of` builds it again
        self.withdrawn.append(finding)
        return True

    def truncate(self, step: int) -> None:
        """Delete the findings after a step, and undo the withdrawals after it."""
        known = sorted((*self.open, *self.withdrawn), key=lambda f: f.step)
        is_undone = (f.withdrawn is not None and f.withdrawn > step for f in known)
        self.set_all([replace(f, **OPEN) if undone else f for f, undone in zip(known, is_undone, strict=True)], step)

    def set_all(self, known: Sequence[Finding], until: float = float("inf")) -> None:
        """Replace all findings by the known ones, open and withdrawn, that were found up to a step."""
        self.open[:] = [f for f in known if f.withdrawn is None and f.step <= until]
        self.withdrawn[:] = [f for f in known if f.withdrawn is not None and f.step <= until]
        self._index.clear()  # `_index_of` builds it again

    def _index_of(self, finding: Finding) -> int | None:
        """Return the index of the open finding of the same kind and layer, or None if there is none."""
        if len(self._index) != len(self.open):  # also if a caller has changed the list itself
            self._index = {(f.kind, f.layer): i for i, f in enumerate(self.open)}
        return self._index.get((finding.kind, finding.layer))
