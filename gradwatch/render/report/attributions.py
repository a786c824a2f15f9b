"""Build attributions.html: attribution maps of samples with their evidence, on one page that needs no network."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from string import Template
from typing import final

from gradwatch.records import Severity
from gradwatch.render.report.page import ASSETS, asset_text, policy
from gradwatch.render.report.text import badge

NAME = "attributions.html"
ABOUT = (
    "Red raises the score and blue lowers it; maps without a sign are red. The verdict comes from the experiments "
    "below each map."
)
SEVERITIES = {"holds": None, "cannot tell": Severity.INFO, "misleads": Severity.WARNING}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MapCard:
    """The map of one sample, ready to show.

    Args:
        title: The sample, its label and the output that is explained.
        verdict: `holds`, `misleads` or `cannot tell`.
        headline: The verdict with the method.
        png: The map over its image, or None if the sample is no image.
        size: Width and height of the picture.
        lines: The map as text, shown if there is no picture.
        evidence: One line for each experiment.
        reasons: What speaks against the map.
    """

    title: str
    verdict: str
    headline: str
    png: bytes | None
    size: tuple[int, int]
    lines: Sequence[str]
    evidence: Sequence[str]
    reasons: Sequence[str]


def attributions_page(title: str, cards: Sequence[MapCard]) -> str:
    """Return maps of samples as one HTML page that loads no other file."""
    style = asset_text(("report.css",))
    return Template((ASSETS / "attributions.html").read_text(encoding="utf-8")).substitute(
        policy=policy("", style), title=escape(title), style=style, about=ABOUT, cards="".join(map(_card, cards))
    )


def _card(card: MapCard) -> str:
    if card.png is None:
        drawn = f"<pre>{_text(card.lines)}</pre>"
    else:
        source, (width, height) = base64.b64encode(card.png).decode("ascii"), card.size
        about = escape(f"{card.title}: {card.headline}")
        drawn = f'<img width="{width}" height="{height}" alt="{about}" src="data:image/png;base64,{source}">'
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in card.reasons)
    return (
        f'<article class="card"><header><h3>{escape(card.title)}</h3>{badge(SEVERITIES[card.verdict], card.headline)}'
        f"</header><figure>{drawn}</figure><pre>{_text(card.evidence)}</pre>{f'<ul>{reasons}</ul>' if reasons else ''}"
        "</article>"
    )


def _text(lines: Sequence[str]) -> str:
    return escape("\n".join(line.removeprefix("  ") for line in lines))
