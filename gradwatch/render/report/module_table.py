"""Show the memory and the time of each module in one step in the report, and store them in the run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any, final

from gradwatch.history.disk import atomic
from gradwatch.render.common import format as units

FILE = "modules.json"
COLUMNS = ("module", "type", "output", "parameters", "saved", "FLOPs", "forward", "backward")
ABOUT = (
    "A module includes everything inside it. Saved: the memory that the graph keeps for the backward pass; a storage "
    "counts in the module that saves it first."
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTable:
    """The memory and the time of one recorded step, by module.

    Args:
        step: The step.
        device: Type of the device.
        peak_bytes: Largest sum of the bytes of all live tensors.
        modules: A row for each module, with the keys of the JSON of `gradwatch plan`.
    """

    step: int
    device: str
    peak_bytes: int
    modules: Sequence[Mapping[str, Any]]

    def write(self, run: Path) -> None:
        """Write the table into a run directory."""
        atomic.replace(run / FILE, json.dumps(asdict(self)).encode("utf-8"))

    @classmethod
    def read(cls, run: Path) -> ModuleTable | None:
        """Return the table in a run directory, or None if it has none that can be read."""
        try:
            table = cls(**json.loads((run / FILE).read_text(encoding="utf-8")))
            table.to_html()
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return table

    def to_html(self) -> str:
        """Return the table with a line above it."""
        head = "".join(f'<th scope="col">{name}</th>' for name in COLUMNS)
        rows = "".join(map(_row, self.modules))
        peak = units.shown_size(self.peak_bytes)
        return (
            f'<p class="hint">Step {self.step:d}, run again on {escape(self.device)}: {peak} at its peak. {ABOUT}</p>'
            f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        )


def _row(module: Mapping[str, Any]) -> str:
    times = [module["forward_ms"], module["backward_ms"]]
    shapes = ", ".join("x".join(f"{n:d}" for n in shape) for shape in module["outputs"])
    texts = [module["type"], shapes]
    numbers = [
        f"{module['parameters']:,d}",
        units.shown_size(module["saved_bytes"]),
        units.number(module["flops"]),
        *("" if ms is None else f"{units.number(ms)} ms" for ms in times),
    ]
    cells = [f"<td>{escape(text)}</td>" for text in texts] + [f'<td class="number">{text}</td>' for text in numbers]
    return f'<tr><th scope="row">{escape(module["name"] or "(the model)")}</th>{"".join(cells)}</tr>'
