"""Show a problem of a config in the style of a compiler: message, place, line with a caret, and remedy."""

from __future__ import annotations

from collections.abc import Iterator

from rich.cells import cell_len
from rich.text import Text

from gradwatch.errors import Excerpt, Problem, dotted

_FRAME = "bold cyan"
_CARET = "bold bright_red"


def shown_problem(problem: Problem) -> Text:
    """Return a problem as text of several lines, without the word `error`."""
    message = f"{dotted(problem.key)}: {problem.text}"
    if not problem.excerpt and problem.place:
        message += f" ({problem.place})"
    margin = " " * len(str(problem.excerpt.line or " ")) if problem.excerpt else " "
    lines = [Text(message)]
    if problem.excerpt:
        lines += _shown_excerpt(problem.excerpt, margin)
    if problem.help:
        lines.append(Text.assemble((f"{margin} = ", _FRAME), ("help: ", "bold"), problem.help))
    return Text("\n").join(lines)


def _shown_excerpt(excerpt: Excerpt, margin: str) -> Iterator[Text]:
    """Yield the place and, if it is known, the line with a caret below the mistake."""
    position = f":{excerpt.line}:{excerpt.column}" if excerpt.line else ""
    yield Text.assemble((f"{margin}--> ", _FRAME), f"{excerpt.name}{position}")
    if not excerpt.text:
        return
    text = excerpt.text.replace("\t", " ")  # one column each, so that the caret stays below its character
    start = excerpt.column - 1
    number = str(excerpt.line or " ")
    yield Text(f"{margin} |", _FRAME)
    yield Text.assemble((f"{number} | ", _FRAME), text)
    # in terminal cells, since a character such as a Chinese one takes two
    pointer = "^" * max(cell_len(text[start : start + excerpt.width]), 1)
    yield Text.assemble((f"{margin} | ", _FRAME), " " * cell_len(text[:start]), (pointer, _CARET))
