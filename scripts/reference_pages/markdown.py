"""Small pieces of Markdown: tables, fenced code, and text that is safe in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MARKUP = re.compile(r"[*<\[]|(?<!\w)_|_(?!\w)")
"""Characters that Markdown takes for markup; an underscore within a word is none."""
URL = re.compile(r"(?<![<(\"'])(https?://[^\s,;)]+[^\s,;).])")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; its cells must be free of line breaks."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def cell(text: str) -> str:
    """Return text as the content of a table's cell."""
    return link_urls(" ".join(text.split())).replace("|", "\\|")


def code(language: str, text: str) -> str:
    """Return a fenced block of code."""
    return f"```{language}\n{text.rstrip()}\n```"


def link_urls(text: str) -> str:
    """Return text whose bare addresses are links, with the characters escaped that Markdown would take for markup."""
    parts = text.split("`")  # code in backticks is every other part
    for i in range(0, len(parts), 2):
        escaped = MARKUP.sub(r"\\\g<0>", parts[i])
        parts[i] = URL.sub(lambda m: "<" + m[1].replace("\\", "") + ">", escaped)
    return "`".join(parts)
