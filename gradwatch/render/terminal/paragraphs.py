"""Print labeled paragraphs: a number keeps its unit at a line break, and a command is never broken."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

LABEL = 10  # columns of a label
INDENT = 2  # columns before a command that does not fit after a label

_GLUE = "\ue000"
"""A character of private use, one column wide. It replaces a space, at which rich would break the line."""
_NUMBER = re.compile(r"(?<=\d) (?=%|(?:us|ms|s|min|h|steps?|epochs?|layers?|units?|samples/s)\b)|(?<=\bstep) (?=\d)")

Row = tuple[str, Text]
"""A label, and a paragraph or a `command`."""


def command(text: str) -> Text:
    """Return a command as the text of a row. It is printed on a line of its own, since people copy it."""
    return Text(text, "bold", no_wrap=True)


def print_rows(console: Console, rows: Iterable[Row]) -> None:
    """Print rows: the label on the right of its column, and the text of each row indented after it."""
    room = max(1, console.width - LABEL - 1)
    for label, text in rows:
        if text.no_wrap and not label and text.cell_len > room:
            lines, indent = [text], INDENT
        else:
            lines, indent = [text] if text.no_wrap else wrapped(text, console, width=room), LABEL + 1
        for i, line in enumerate(lines):
            shown = f"{'' if i else label:>{LABEL}} "[:indent] if label or i == 0 else " " * indent
            # soft_wrap: only the terminal may break a line, which leaves a copied command whole
            console.print(Text.assemble((shown, "dim"), line), soft_wrap=True)


def print_lines(console: Console, lines: Iterable[Text]) -> None:
    """Print lines that fit the terminal, and that only the terminal itself may break."""
    for line in lines:
        console.print(line, soft_wrap=True)


def wrapped(text: Text, console: Console, *, width: int) -> list[Text]:
    """Return the lines of a text at a width. A line breaks neither between a number and its unit nor within a word."""
    glued = text.copy()
    glued.plain = _NUMBER.sub(_GLUE, glued.plain)
    lines = glued.wrap(console, width, overflow="fold")
    for line in lines:
        line.plain = line.plain.replace(_GLUE, " ")
        line.rstrip()
    return list(lines)
