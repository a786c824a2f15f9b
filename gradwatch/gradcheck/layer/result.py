"""Hold the verdict on each property of a layer, and print them as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, final

from gradwatch.probe.place import NOWHERE, Place
from gradwatch.records import plain_fields

Outcome = Literal["holds", "fails", "cannot tell"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProperty:
    """The verdict on one property of a layer.

    Args:
        name: The property, such as `shapes` or `samples`; `check_layer` gives it.
        outcome: holds, fails or cannot tell.
        text: What was seen, in words.
        module: Path of the submodule at fault; empty for the layer itself or if unknown.
        place: Line at fault.
    """

    name: str = ""
    outcome: Outcome
    text: str
    module: str = ""
    place: Place = NOWHERE

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return plain_fields(self) | {"module": self.module or None}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCheck:
    """What `gradwatch.check_layer` returns. Its text is a table with one row per property.

    Args:
        layer: Class of the layer.
        properties: Verdicts, in the order of the table.
        seconds: Duration of the check.
    """

    layer: str
    properties: tuple[LayerProperty, ...]
    seconds: float

    @property
    def verdict(self) -> Outcome:
        """Return fails if any property fails, holds if every one that could be judged holds."""
        outcomes = [p.outcome for p in self.properties]
        if "fails" in outcomes:
            return "fails"
        return "holds" if "holds" in outcomes else "cannot tell"

    @property
    def is_wrong(self) -> bool:
        """Return whether any property fails."""
        return self.verdict == "fails"

    def __getitem__(self, name: str) -> LayerProperty:
        """Return the verdict on a property by its name."""
        return next(p for p in self.properties if p.name == name)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"verdict": self.verdict} | plain_fields(self)

    def __str__(self) -> str:
        holding = sum(p.outcome == "holds" for p in self.properties)
        lines = [f"{self.layer}: {holding} of {len(self.properties)} properties hold, in {self.seconds:.1f} s"]
        width = max(len(p.name) for p in self.properties)
        for p in self.properties:
            lines.append(f"  {p.name:<{width}}  {p.outcome:<11}  {p.text}")
            if p.place.text:
                lines.append(f"  {'':<{width}}  {'':<11}  {p.place}: {p.place.text}")
        return "\n".join(lines)
