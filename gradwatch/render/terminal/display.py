"""The part of a terminal or notebook that is redrawn in place, and the lines that others write meanwhile."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol, TextIO, final

from rich.console import Console
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

PAGE = "<pre style=\"line-height:1.2;font-family:Menlo,Consolas,'DejaVu Sans Mono',monospace\">{code}</pre>"


class Screen(Protocol):
    """Something that shows one view at a time."""

    def show(self, view: Text) -> None:
        """Replace the view."""
        ...

    def stop(self) -> None:
        """Take the view away and leave everything as it was."""
        ...


def screen(console: Console) -> Screen:
    """Return the display on which a console redraws its view."""
    return Notebook() if console.is_jupyter else PrintedLines(console)


@final
class PrintedLines:
    """The last lines of a terminal.

    What is printed meanwhile appears above them: to standard output through rich, and to standard error as it was
    written, with the view taken away for that time. An error stream that is no terminal is left alone.

    Args:
        console: The terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._error: TextIO | None = None
        self._view: Text | None = None
        self._width = console.width
        self._turn = threading.RLock()  # a warning may come from another thread than the view
        # no thread of its own: the caller of `show` redraws, so nothing moves while a step computes
        self._live = self._new()
        self._live.start()
        if sys.stderr.isatty():
            self._error, sys.stderr = sys.stderr, _Above(sys.stderr, self._around)

    def show(self, view: Text) -> None:
        """Replace the view, even if the terminal has become narrower."""
        with self._turn:
            if self._view is not None and self._console.width < self._width:
                upwards = ((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1))
                self._console.control(Control(*upwards * self._wrapped()))
            self._width = self._console.width
            self._view = view
            self._live.update(view, refresh=True)

    def stop(self) -> None:
        """Take the view away, and give cursor and error stream back."""
        with self._turn:
            self._live.stop()
            if self._error is not None:
                sys.stderr, self._error = self._error, None

    def _new(self) -> Live:
        return Live(console=self._console, auto_refresh=False, transient=True, redirect_stderr=False)

    def _around(self, write: Callable[[], object]) -> None:
        """Write something while the view is away."""
        with self._turn:
            self._live.stop()
            try:
                write()
            finally:
                self._live = self._new()
                self._live.start()
                if self._view is not None:
                    self._live.update(self._view, refresh=True)

    def _wrapped(self) -> int:
        """Return how many lines more the view takes since a narrower terminal has wrapped it."""
        assert self._view is not None, "asked of a view that is shown"
        lengths = [len(line) for line in self._view.plain.split("\n")]
        return sum(max(0, length - 1) // self._console.width for length in lengths)


@final
class Notebook:
    """The output of a notebook's cell, as HTML that is replaced in place."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, view: Text) -> None:
        """Replace the view."""
        from IPython.display import HTML, display

        page = HTML(html(view))
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)

    def stop(self) -> None:
        """Take the view away."""
        if self._handle is not None:
            from IPython.display import HTML

            self._handle.update(HTML(""))
            self._handle = None


def html(view: Text) -> str:
    """Return text with its colours as HTML; everything in it is escaped."""
    width = max(map(len, view.plain.split("\n"))) + 1
    console = Console(record=True, file=io.StringIO(), width=width, force_jupyter=False, color_system="truecolor")
    console.print(view, soft_wrap=True)
    return console.export_html(inline_styles=True, code_format=PAGE)


@final
class _Above(io.TextIOBase):
    """An error stream that writes whole lines above a view.

    Args:
        stream: Where they go.
        around: Calls what it is given while the view is away.
    """

    def __init__(self, stream: TextIO, around: Callable[[Callable[[], object]], None]) -> None:
        self._stream = stream
        self._around = around
        self._unfinished = ""

    @property
    def encoding(self) -> str:  # type: ignore[override] # typeshed has it as an attribute, io as a property
        """Encoding of the stream."""
        return self._stream.encoding

    def write(self, text: str) -> int:
        """Take text, and write what is complete of it."""
        whole, newline, rest = (self._unfinished + text).rpartition("\n")
        self._unfinished = rest
        if newline:
            self._around(lambda: self._emit(whole + newline))
        return len(text)

    def flush(self) -> None:
        """Do nothing: whole lines are with the terminal already, and others must wait for their end."""

    def isatty(self) -> bool:
        """Say that it is a terminal: no other is taken over."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of the stream, for what writes past Python."""
        return self._stream.fileno()

    def _emit(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
