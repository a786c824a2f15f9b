"""Hold the verdict on each stage of a step, with the ratio and the place of the statement."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, final, get_args

from gradwatch.mistakes import code_of, shown_code
from gradwatch.probe.place import NOWHERE, Place
from gradwatch.records import plain_fields

StageName = Literal["loss", "gradient", "accumulate", "unscale", "clip", "update", "write-back", "schedule"]
STAGES: tuple[StageName, ...] = get_args(StageName)
"""In the order of a step."""
StageVerdict = Literal["as meant", "differs", "not seen"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """A stage that differs from its purpose.

    Args:
        kind: Kind of the mistake, such as `loss-not-divided`.
        text: One sentence for people.
        place: The statement.
        ratio: Result of the stage over the intended result; nan if it is not a multiple.
        tensors: Names of the parameters concerned.
        stage: The stage; set by `judged`.
    """

    kind: str
    text: str
    place: Place = NOWHERE
    ratio: float = math.nan
    tensors: tuple[str, ...] = ()
    stage: StageName | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return plain_fields(self) | {"code": code_of(self.kind)}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The verdict on a stage.

    Args:
        name: The stage.
        verdict: as meant, differs or not seen.
        text: One sentence for people; empty if the stage is as meant.
        difference: The mistake, or None.
    """

    name: StageName
    verdict: StageVerdict
    text: str = ""
    difference: Deviation | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"name": self.name, "verdict": self.verdict, "text": self.text or None}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepAudit:
    """What `gradwatch.audit_step` returns. It is true if no stage differs, and its text is a table of the stages.

    Args:
        stages: The verdict on each stage, in the order of a step.
        differences: All mistakes, in the order of the stages.
        passes: Number of backward passes before the last update.
        updates: Number of updates by the optimizer.
        notes: Further remarks.
    """

    stages: tuple[Stage, ...]
    differences: tuple[Deviation, ...]
    passes: int
    updates: int
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Deviation | None:
        """Return the first stage that differs, with its mistake; later ones often follow from it."""
        return self.differences[0] if self.differences else None

    def __bool__(self) -> bool:
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"verdict": "as meant" if self else "differs"} | plain_fields(self)

    def __str__(self) -> str:
        first = self.first
        lines = [f"the step differs in its {first.stage}" if first else "the step is as meant"]
        for difference in self.differences:
            lines.append(f"  {difference.text}{shown_code(difference.kind)}")
            if difference.place:
                lines.append(f"      {difference.place}: {difference.place.text}")
        for stage in self.stages:
            has_ratio = stage.difference is not None and math.isfinite(stage.difference.ratio)
            ratio = f"ratio {stage.difference.ratio:.6g}" if stage.difference and has_ratio else ""
            said = ratio if stage.difference else stage.text
            lines.append(f"  {stage.name:<10}  {stage.verdict:<8}  {said}".rstrip())
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])
