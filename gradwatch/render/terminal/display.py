"""Redraw a view in place, in a terminal or a notebook."""

from __future__ import annotations

import io
import sys
from typing import Any, final

from rich.console import Console
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

PAGE = "<pre style=\"line-height:1.2;font-family:Menlo,Consolas,'DejaVu Sans Mono',monospace\">{code}</pre>"


@final
class PrintedLines:
    """Redraws a view in the last lines of a terminal.

    Text printed in between appears above the view. An error stream that is not a terminal, such as a file, is
    not redirected.

    Args:
        console: Console of the terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._view: Text | None = None
        self._width = console.width
        # auto_refresh=False: no extra thread, since the caller of `show` redraws
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stderr=sys.stderr.isatty())
        self._live.start()

    def show(self, view: Text) -> None:
        """Replace the view, also after the terminal became narrower."""
        # a narrower terminal has wrapped the old view into more lines than rich knows of: erase the extra ones
        if self._view is not None and self._console.width < self._width:
            upwards = ((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1))
            self._console.control(Control(*upwards * _num_wrapped_lines(self._view, self._console.width)))
        self._width = self._console.width
        self._view = view
        self._live.update(view, refresh=True)

    def stop(self) -> None:
        """Remove the view, and restore the cursor and the error stream."""
        self._live.stop()


def _num_wrapped_lines(view: Text, width: int) -> int:
    # the terminal wraps a line only when a character follows: a line of exactly `width` takes one
    return sum(max(0, len(line) - 1) // width for line in view.plain.split("\n"))


@final
class Notebook:
    """Redraws a view in the output of a notebook cell, as HTML."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, view: Text) -> None:
        """Replace the view."""
        # imported here: outside of a notebook, IPython may not be installed
        from IPython.display import HTML, display

        page = HTML(html(view))
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)

    def stop(self) -> None:
        """Remove the view."""
        if self._handle is not None:
            from IPython.display import HTML

            self._handle.update(HTML(""))
            self._handle = None


def html(view: Text) -> str:
    """Return text with its colors as HTML, escaped."""
    # as wide as the longest line, so that nothing wraps
    console = html_console(max(map(len, view.plain.split("\n"))) + 1)
    console.print(view, soft_wrap=True)
    return exported_html(console)


def html_console(width: int) -> Console:
    """Return a console that prints nothing and records its output for `exported_html`."""
    return Console(record=True, file=io.StringIO(), width=width, force_jupyter=False, color_system="truecolor")


def exported_html(console: Console) -> str:
    """Return the recorded output of an `html_console` as HTML with colors, escaped."""
    return console.export_html(inline_styles=True, code_format=PAGE)
