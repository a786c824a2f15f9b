"""Write the table of all recorded statistics from the catalogue."""

from __future__ import annotations

from gradwatch import catalogue
from scripts.reference_pages.markdown import cell, table

TABLES = (
    ("Of each parameter tensor", catalogue.PARAM),
    ("Of each activation module", catalogue.ACT),
    ("Of the whole run", catalogue.RUN),
)


def statistics_page() -> str:
    """Return the tables: name, unit, meaning, and when a statistic is measured."""
    parts = []
    for title, statistics in TABLES:
        rows = [(f"`{s.name}`", cell(s.unit), cell(s.meaning), cell(s.cost.text)) for s in statistics]
        parts.append(f"### {title}\n\n" + table(("statistic", "unit", "meaning", "measured"), rows))
    return "\n\n".join(parts)
