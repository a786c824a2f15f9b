"""Show attribution maps of samples with their evidence as cards of a page, and store them in its run directory."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import final

from gradwatch.history.disk import atomic
from gradwatch.records import Severity
from gradwatch.render.common import format as units
from gradwatch.render.report.text import badge, definitions

FILE = "attributions.json"
ABOUT = (
    "Red raises the score and blue lowers it; maps without a sign are red. The verdict comes from the experiments "
    "next to each map."
)
SEVERITIES = {"holds": None, "cannot tell": Severity.INFO, "misleads": Severity.WARNING}
LEVELS = 5
"""Number of color strengths of a token."""
HALF = 100
"""Half of the width of a bar chart, in which a bar grows from the middle."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MapCard:
    """The map of one sample, ready to show: as a picture, as colored tokens, or as bars.

    Args:
        title: The sample, its label and the output that is explained.
        verdict: `holds`, `misleads` or `cannot tell`.
        headline: The verdict with the method.
        png: The image and the map over it, in base64; empty if the sample is not an image.
        size: Width and height of the picture.
        tokens: Tokens in their order with their values; empty if the sample is not text.
        bars: The largest features with their values; empty if there is a picture or a text.
        evidence: Each experiment with its result.
        reasons: Reasons against the map.
    """

    title: str
    verdict: str
    headline: str
    png: str = ""
    size: Sequence[int] = (0, 0)
    tokens: Sequence[tuple[str, float]] = field(default=())
    bars: Sequence[tuple[str, float]] = field(default=())
    evidence: Sequence[tuple[str, str]] = field(default=())
    reasons: Sequence[str] = field(default=())


@final
@dataclass(frozen=True, slots=True)
class MapCards:
    """Maps of samples under one title; if there are no maps, the title says why."""

    title: str
    cards: Sequence[MapCard]

    def write(self, run: Path) -> None:
        """Write the maps into a run directory."""
        atomic.replace(run / FILE, json.dumps(asdict(self)).encode("utf-8"))

    @classmethod
    def read(cls, run: Path) -> MapCards | None:
        """Return the maps in a run directory, or None if it has none that can be read."""
        try:
            data = json.loads((run / FILE).read_text(encoding="utf-8"))
            return cls(str(data["title"]), [MapCard(**card) for card in data["cards"]])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def to_html(self) -> str:
        """Return a card for each map."""
        return "".join(map(_card, self.cards))


def png_text(png: bytes) -> str:
    """Return a picture as the text that a card holds."""
    return base64.b64encode(png).decode("ascii")


def _card(card: MapCard) -> str:
    if card.png:
        width, height = card.size
        about = escape(f"{card.title}: {card.headline}")
        drawn = f'<img width="{width}" height="{height}" alt="{about}" src="data:image/png;base64,{card.png}">'
    else:
        drawn = _tokens(card.tokens) if card.tokens else _bars(card.bars)
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in card.reasons)
    return (
        f'<article class="card"><header><h3>{escape(card.title)}</h3>{badge(SEVERITIES[card.verdict], card.headline)}'
        f'</header><div class="attribution"><figure>{drawn}</figure>{definitions(card.evidence)}</div>'
        f"{f'<ul>{reasons}</ul>' if reasons else ''}</article>"
    )


def _tokens(tokens: Sequence[tuple[str, float]]) -> str:
    largest = max((abs(value) for _, value in tokens), default=0.0) or 1.0
    spans = []
    for text, value in tokens:
        # the square root: one dominant token would leave the others without color
        level = round(LEVELS * (abs(value) / largest) ** 0.5)
        shown = "\u21b5\n" if text == "\n" else text
        name = f' class="{"raises" if value >= 0 else "lowers"} strength{level}"' if level else ""
        spans.append(f'<span{name} title="{escape(units.value(value))}">{escape(shown)}</span>')
    return f'<p class="tokens">{"".join(spans)}</p>'


def _bars(bars: Sequence[tuple[str, float]]) -> str:
    largest = max((abs(value) for _, value in bars), default=0.0) or 1.0
    rows = []
    for name, value in bars:
        length = HALF * abs(value) / largest
        start = HALF if value >= 0 else HALF - length
        rows.append(
            f'<tr><th scope="row">{escape(name)}</th><td class="number">{value:+.3g}</td><td>'
            f'<svg class="bar" width="{2 * HALF}" height="12" aria-hidden="true"><rect '
            f'class="{"raises" if value >= 0 else "lowers"}" x="{start:.1f}" y="1" width="{length:.1f}" height="10"/>'
            f'<line x1="{HALF}" x2="{HALF}" y1="0" y2="12"/></svg></td></tr>'
        )
    return f'<table class="features"><tbody>{"".join(rows)}</tbody></table>'
