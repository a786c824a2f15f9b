"""The Sink interface: one history, many renderings."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding

LogFormat = Literal["auto", "rich", "plain", "json"]
"""How a training shows itself: `auto` takes the live view on a terminal and plain lines elsewhere."""

SINKS = {
    "html": "gradwatch.render.report.sink:Html",
    "terminal": "gradwatch.render.terminal.sink:Terminal",
    "tensorboard": "gradwatch.render.tensorboard.sink:TensorBoard",
}
"""The class of each sink of this package, imported only when one is made; `html` first, as the terminal names it."""


@runtime_checkable
class Sink(Protocol):
    """Shows a run while it goes on. It reads the history and keeps its own schedule; it never calls back.

    A sink that raises is switched off with one warning: it never stops a training. So it lets go of screen and files
    before it raises. Its `close` is called however the training ends, by an error or an interrupt too.

    Where it has an attribute `every`, it is sure to be shown the steps that are a multiple of that, 0 for none; without
    one, each step.
    """

    def write(self, history: History) -> None:
        """Look at the newest step. Under a microsecond where nothing is due."""
        ...

    def report(self, finding: Finding) -> None:
        """Show a finding, at the moment it is made; it is in the history already."""
        ...

    def close(self, history: History, diagnoses: tuple[Diagnosis, ...]) -> None:
        """Show the end of the run and let go of files and screen. The history may hold no step at all."""
        ...
