"""A recorded run as a person meets it in Python: arrays by name, findings, a figure, and itself in a notebook."""

# T = recorded steps, L = layers (rows of a table)

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.diagnose.rank import diagnose
from gradwatch.history.disk.writer import read
from gradwatch.history.store import Floats, History, Table
from gradwatch.records import Diagnosis, Event, Finding, RunInfo
from gradwatch.render.common.format import plural
from gradwatch.render.notebook import plot
from gradwatch.render.terminal.summary import summary_html

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@final
class Run:
    """A recorded run. In a notebook it shows its verdict, its findings and its layers.

    `run["grad.l2"]` is a NumPy array of all that is kept of a statistic, `run.steps("grad.l2")` are its steps, and
    `run.plot("grad.l2")` draws it. `gradwatch list statistics` names them all.

    Args:
        history: What was recorded.

    Attributes:
        history: The same, as detectors and sinks read it.
    """

    def __init__(self, history: History) -> None:
        self.history = history

    @property
    def info(self) -> RunInfo:
        """What it is a recording of."""
        return self.history.info

    @property
    def findings(self) -> list[Finding]:
        """What was found, in the order of its finding."""
        return self.history.findings

    @property
    def events(self) -> list[Event]:
        """What happened besides."""
        return self.history.events

    @functools.cached_property
    def diagnoses(self) -> tuple[Diagnosis, ...]:
        """What explains the findings, the most telling first."""
        return diagnose(self.history)

    @property
    def step(self) -> int:
        """The newest recorded optimizer step, or -1 before the first."""
        return self.history.step

    @property
    def groups(self) -> int:
        """Number of optimizer groups."""
        return self.history.groups

    @property
    def param(self) -> Table:
        """The table with a row per parameter tensor and step."""
        return self.history.param

    @property
    def act(self) -> Table:
        """The table with a row per activation module and sampled step."""
        return self.history.act

    @property
    def run(self) -> Table:
        """The table with one row per step."""
        return self.history.run

    def __getitem__(self, statistic: str) -> Floats:
        """Return all that is kept of a statistic: shape (T, L), or (T,) for one of the run."""
        return self.history[statistic]

    def steps(self, statistic: str) -> NDArray[np.int64]:
        """Return the steps at which a statistic is kept, of shape (T,)."""
        return self.history.steps(statistic)

    def frame(self, statistic: str) -> pandas.DataFrame:
        """Return a statistic as a pandas frame: steps down, layers across. Needs pandas."""
        return self.history.frame(statistic)

    def plot(self, statistic: str, *, layers: Sequence[str] | None = None) -> Figure:
        """Draw a statistic over the run, a line per layer, with the findings marked. Needs matplotlib.

        Args:
            statistic: Such as `grad.l2`.
            layers: Parameter tensors or activation modules to draw, by name; all by default.

        Raises:
            GradwatchError: There is no such statistic or layer, or matplotlib is not installed.
        """
        return plot.plot(self.history, statistic, layers=layers)

    def __repr__(self) -> str:
        steps, findings = plural(self.step + 1, "step"), plural(len(self.findings), "finding")
        return f"<Run {self.info.name}: {steps}, {findings}>"

    def _repr_html_(self) -> str:
        return summary_html(self.history, self.diagnoses)


def load_run(path: str | os.PathLike[str]) -> Run:
    """Return a recorded run, live or finished.

    Args:
        path: A run directory.

    Raises:
        RunError: It is none, or cannot be read. Where a part is damaged, a warning names it and the rest is read.
    """
    return Run(read(Path(path)))
