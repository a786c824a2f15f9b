"""Draw the layers of the import contracts as docs/layers.svg: `python scripts/tools/draw_layers.py`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "layers.svg"
WIDTH, ROW, GAP, MARGIN, HEADING = 900, 40, 10, 24, 34  # pixels
FREE_OF_TORCH, MAY_USE_TORCH = "#e3f1e5", "#e4ecf7"
LINE, TEXT, FAINT = "#5b6670", "#1c2329", "#5b6670"


def draw(pyproject: str) -> str:
    """Return the layers of the import contracts as SVG, the top layer first.

    Args:
        pyproject: Text of pyproject.toml.
    """
    contracts = tomllib.loads(pyproject)["tool"]["importlinter"]["contracts"]
    torch_free = next(
        set(c["source_modules"]) for c in contracts if c["type"] == "forbidden" and "torch" in c["forbidden_modules"]
    )
    parts: list[str] = []
    top = MARGIN
    for contract in (c for c in contracts if c["type"] == "layers"):
        (package,) = contract["containers"]
        parts.append(_text(MARGIN, top + 18, f"{contract['name']}  ({package})", weight="600"))
        top += HEADING
        for layer in contract["layers"]:
            rooms = [room.strip() for room in layer.split("|")]
            parts += _row(package, rooms, top, torch_free)
            top += ROW + GAP
        top += MARGIN
    note = "A room imports only from rows below it; rooms in one row are independent. Green: free of torch."
    parts.append(_text(MARGIN, top, note, color=FAINT))
    height = top + MARGIN
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>', *parts, "</svg>", ""])


def _row(package: str, rooms: list[str], top: int, torch_free: set[str]) -> list[str]:
    width = (WIDTH - 2 * MARGIN - GAP * (len(rooms) - 1)) / len(rooms)
    drawn = []
    for i, room in enumerate(rooms):
        left = MARGIN + i * (width + GAP)
        name = f"{package}.{room}"
        is_free = any(name == module or name.startswith(f"{module}.") for module in torch_free)
        color = FREE_OF_TORCH if is_free else MAY_USE_TORCH
        drawn.append(
            f'<rect x="{left:.0f}" y="{top}" width="{width:.0f}" height="{ROW}" rx="5" fill="{color}" stroke="{LINE}"/>'
        )
        drawn.append(_text(left + width / 2, top + 25, room, anchor="middle"))
    return drawn


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "400", color: str = TEXT) -> str:
    font = f'font-family="system-ui, sans-serif" font-size="14" font-weight="{weight}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {font} fill="{color}" text-anchor="{anchor}">{escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw((ROOT / "pyproject.toml").read_text()))
    print(PICTURE.relative_to(ROOT))
