"""Build attributions.html: attribution maps of samples with their evidence, on one page that needs no network."""

from __future__ import annotations

from html import escape
from string import Template

from gradwatch.render.report.map_cards import ABOUT, MapCards
from gradwatch.render.report.page import ASSETS, asset_text, policy

NAME = "attributions.html"


def attributions_page(maps: MapCards) -> str:
    """Return maps of samples as one HTML page that loads no other file."""
    style = asset_text(("report.css",))
    return Template((ASSETS / "attributions.html").read_text(encoding="utf-8")).substitute(
        policy=policy("", style), title=escape(maps.title), style=style, about=ABOUT, cards=maps.to_html()
    )
