"""Define the sink: an object that shows a run while it trains."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding

LogFormat = Literal["auto", "rich", "plain", "json"]
"""Output format of a training: `auto` is the live view on a terminal and plain lines elsewhere."""

SINKS = {
    # before the terminal: the terminal's summary names report.html if the file exists
    "html": "gradwatch.render.report.sink:Html",
    "terminal": "gradwatch.render.terminal.sink:Terminal",
    "tensorboard": "gradwatch.render.tensorboard.sink:TensorBoard",
    # after html: they send report.html
    "wandb": "gradwatch.render.trackers.wandb:Wandb",
    "mlflow": "gradwatch.render.trackers.mlflow:Mlflow",
    "trackio": "gradwatch.render.trackers.trackio:Trackio",
    "callable": "gradwatch.render.trackers.function:Function",
}
"""Import path of each sink class, so that an unused sink is never imported."""
ON_REQUEST = frozenset({"wandb", "mlflow", "trackio", "callable"})
"""Sinks that are used only if a config or `watch` names them."""


@runtime_checkable  # the tests check sinks with `isinstance`
class Sink(Protocol):
    """Shows a run while it trains.

    A sink reads the history and decides when to write. It never calls back into the training.

    A sink that raises is disabled with one warning, and the training continues. Such a sink must release the screen and
    its files before it raises. `close` is called at every end of a training, also after an error or an interrupt.

    A sink may have an attribute `every`: `write` is then called at least at each multiple of it, and 0 asks for no
    step. Without the attribute, `write` is called at each step.

    A sink may have a method `open(history)`, which is called once before the first step.

    A sink may have a method `withdraw(finding)`. It is called with a finding that is no longer open, after its
    withdrawal. The history then holds the finding in `withdrawn`.

    A sink may have a method `discard()`. It is called instead of `close` for a run that is dropped, such as a run
    without a step. It releases files, and shows nothing.
    """

    def write(self, history: History) -> None:
        """Show the newest step, if output is due. If none is due, return within 1 us."""
        ...

    def report(self, finding: Finding) -> None:
        """Show a new finding. The history already contains it."""
        ...

    def close(self, history: History, diagnoses: tuple[Diagnosis, ...]) -> None:
        """Show the end of the run, and release files and screen. The history may be empty."""
        ...
