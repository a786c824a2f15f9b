"""Where the commands write: results to standard output, errors and warnings to standard error."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import IO, Literal, TextIO

from rich.console import Console
from rich.text import Text

PACKAGE = Path(__file__).parents[1]
_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold"}


class PipeConsole(Console):
    """A console that goes on in silence where its reader went away, as in `gradwatch list models | head`."""

    def on_broken_pipe(self) -> None:
        """Go on without writing; rich would end the process with code 1, which means findings here."""
        _send_nowhere(self.file)


def output() -> Console:
    """Return the console for results that are laid out for people."""
    return PipeConsole()


def write(text: str) -> None:
    """Write a result as it is, in lines that are never wrapped."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _send_nowhere(sys.stdout)


def complain(kind: Literal["error", "warning", "note"], text: str) -> None:
    """Write a message to standard error, in lines as they are: never wrapped, so that they can be searched."""
    message = Text.assemble((f"{kind}: ", _STYLES[kind]), text)
    PipeConsole(stderr=True).print(message, soft_wrap=True)


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show a Python warning: ours as a message, those of others with their place, as Python does."""
    import warnings

    if Path(filename).is_relative_to(PACKAGE):
        complain("warning", str(message).removeprefix("gradwatch: "))
    else:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        (file or sys.stderr).write(text)


def _send_nowhere(stream: IO[str]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
