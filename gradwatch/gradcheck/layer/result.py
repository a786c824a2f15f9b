"""Hold the verdict on each property of a layer, and print them as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, final

from gradwatch.errors import shown_path

Outcome = Literal["holds", "fails", "cannot tell"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProperty:
    """The verdict on one property of a layer.

    Args:
        name: The property, such as `shapes` or `samples`.
        outcome: holds, fails or cannot tell.
        text: What was seen, in words.
        module: Path of the submodule at fault; empty for the layer itself or if unknown.
        file: File of the line at fault, or an empty string.
        line: Line at fault, or 0.
        source: Text of the line.
    """

    name: str
    outcome: Outcome
    text: str
    module: str = ""
    file: str = ""
    line: int = 0
    source: str = ""

    @property
    def place(self) -> str:
        """Return file and line, such as `model.py:14`, or an empty string."""
        return f"{shown_path(self.file)}:{self.line}" if self.file else ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCheck:
    """What `gradwatch.check_layer` returns. Its text is a table with one row per property.

    Args:
        layer: Class of the layer.
        properties: Verdicts, in the order of the table.
        seconds: How long it took.
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
        return {
            "layer": self.layer,
            "verdict": self.verdict,
            "properties": [
                {
                    "name": p.name,
                    "outcome": p.outcome,
                    "text": p.text,
                    "module": p.module or None,
                    "file": p.file or None,
                    "line": p.line or None,
                }
                for p in self.properties
            ],
            "seconds": round(self.seconds, 3),
        }

    def __str__(self) -> str:
        holding = sum(p.outcome == "holds" for p in self.properties)
        lines = [f"{self.layer}: {holding} of {len(self.properties)} properties hold, in {self.seconds:.1f} s"]
        width = max(len(p.name) for p in self.properties)
        for p in self.properties:
            lines.append(f"  {p.name:<{width}}  {p.outcome:<11}  {p.text}")
            if p.source:
                lines.append(f"  {'':<{width}}  {'':<11}  {p.place}: {p.source}")
        return "\n".join(lines)
