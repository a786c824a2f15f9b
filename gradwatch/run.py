"""Read a recorded run in Python: arrays by name, findings, figures, and a summary in a notebook."""

# T = recorded steps, L = layers (rows of a table)

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.config.settings import with_settings
from gradwatch.diagnose.rank import diagnose
from gradwatch.history.disk.parquet import write_parquet
from gradwatch.history.disk.ranks import rank_parts
from gradwatch.history.disk.writer import read
from gradwatch.history.store import Floats, History, Table
from gradwatch.paths import user_path
from gradwatch.records import Diagnosis, Event, Finding, Lines, RunInfo
from gradwatch.render.common.format import plural
from gradwatch.render.common.summary_lines import summary_text
from gradwatch.render.notebook import plot
from gradwatch.render.terminal.diagnosis import diagnosis_html

# optional dependencies: imported only by the methods that need them
if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@final
class Run:
    """A recorded run. In a notebook, it shows its verdict, its findings and its layers.

    `run["grad.l2"]` is a NumPy array with the kept values of a statistic. `run.steps("grad.l2")` are their steps, and
    `run.plot("grad.l2")` draws them. `gradwatch list statistics` lists all statistics.

    Args:
        history: Recorded data of the run.

    Attributes:
        history: The recorded data, as detectors and sinks read it.
    """

    def __init__(self, history: History) -> None:
        self.history = history

    @property
    def info(self) -> RunInfo:
        """Name, layers, settings and environment of the run."""
        return self.history.info

    @functools.cached_property
    def ranks(self) -> dict[int, Run]:
        """The runs of all ranks of a distributed training, by rank. The part of a rank has only itself."""
        parts = rank_parts(self.history.directory) if self.history.directory and not self.info.rank else {}
        return {self.info.rank: self} | {rank: load_run(path) for rank, path in parts.items()}

    @property
    def findings(self) -> Lines[Finding]:
        """The open findings, oldest first."""
        return Lines(self.history.findings)

    @property
    def withdrawn(self) -> Lines[Finding]:
        """The findings that later steps have shown to be over, oldest withdrawal first."""
        return Lines(self.history.withdrawn)

    @property
    def events(self) -> list[Event]:
        """The events, such as rewinds and skipped batches."""
        return self.history.events

    @functools.cached_property  # a notebook asks for them each time it shows the run
    def diagnoses(self) -> Lines[Diagnosis]:
        """The diagnoses of the findings, most severe first."""
        return Lines(diagnose(self.history))

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
        """The table with one row per parameter tensor and step."""
        return self.history.param

    @property
    def act(self) -> Table:
        """The table with one row per activation module and sampled step."""
        return self.history.act

    @property
    def run(self) -> Table:
        """The table with one row per step."""
        return self.history.run

    def __getitem__(self, statistic: str) -> Floats:
        """Return the kept values of a statistic, of shape (T, L), or (T,) for a statistic of the run."""
        return self.history[statistic]

    def steps(self, statistic: str) -> NDArray[np.int64]:
        """Return the kept steps of a statistic, of shape (T,)."""
        return self.history.steps(statistic)

    def frame(self, statistic: str) -> pandas.DataFrame:
        """Return a statistic as a pandas frame with a row per step and a column per layer. Needs pandas."""
        return self.history.frame(statistic)

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write all statistics to a Parquet file, with a row per step, layer and statistic. Needs pyarrow.

        Args:
            path: The file, which is replaced if it exists. The page on run directories describes its columns.

        Raises:
            GradwatchError: pyarrow is not installed, or the file cannot be written.
        """
        write_parquet(self.history, user_path(path))

    def plot(self, statistic: str, *, layers: Sequence[str] | None = None) -> Figure:
        """Draw a statistic over the run, with a line per layer and the findings marked. Needs matplotlib.

        Args:
            statistic: Name of the statistic, such as `grad.l2`.
            layers: Names of the parameter tensors or activation modules to draw; all by default.

        Returns:
            A figure that a notebook shows and `savefig` writes.

        Raises:
            GradwatchError: The statistic or a layer does not exist, or matplotlib is not installed.
        """
        return plot.plot(self.history, statistic, layers=layers)

    def __str__(self) -> str:
        return summary_text(self.history, self.diagnoses, run_dir=self.history.directory)

    def __repr__(self) -> str:
        steps, findings = plural(self.step + 1, "step"), plural(len(self.findings), "finding")
        return f"<Run {self.info.name}: {steps}, {findings}>"

    def _repr_html_(self) -> str:
        return diagnosis_html(self.history, self.diagnoses)


def load_run(path: str | os.PathLike[str]) -> Run:
    """Return a recorded run, live or finished.

    Args:
        path: Run directory. If a file in it is damaged, a warning names the file and the rest is read.

    Raises:
        RunError: `path` is not a run directory, or cannot be read.
    """
    directory = user_path(path)
    return Run(with_settings(read(directory), directory))
