"""Show what a long command is doing, in a line of the terminal that vanishes at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.text import Text

from gradwatch.cli.output.console import output
from gradwatch.render.common.sparkline import UNICODE, glyphs

SPINNER = 2  # columns of the spinner and the space after it


@contextlib.contextmanager
def progress_line(*, hidden: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that replaces the text of the line.

    Args:
        hidden: Whether to show nothing, as for output that programs read. An output that is not a terminal, or that
            cannot move its cursor, shows nothing either.
    """
    console = output()
    if hidden or not console.is_terminal or console.is_dumb_terminal:
        yield lambda text: None
        return
    is_unicode = glyphs(console) is UNICODE
    with console.status("", spinner="dots" if is_unicode else "line") as status:

        def show(text: str) -> None:
            line = Text(text)  # as Text, since brackets in a string would be markup
            line.truncate(max(1, console.width - SPINNER - 1), overflow="ellipsis" if is_unicode else "crop")
            status.update(line)

        yield show
