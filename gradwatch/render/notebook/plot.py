"""Draw a statistic of a run with matplotlib: a line per layer, early to late, with the findings marked."""

# T = recorded steps, L = layers (rows of a table)

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gradwatch.errors import GradwatchError, did_you_mean
from gradwatch.history.store import Floats, History
from gradwatch.records import Finding, Severity
from gradwatch.render.common.format import shorten
from gradwatch.render.common.series import EVERY_STEP, LINEAR

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# at least 3:1 on black and on white (WCAG 2.1, 1.4.11)
COLORS = {Severity.INFO: "#0087af", Severity.WARNING: "#d75f00", Severity.CRITICAL: "#d70000"}
MAX_NAMED_LAYERS = 10
"""Maximum number of layers with their names next to the figure. For more, a color bar shows early to late."""
MAX_MARKED_FINDINGS = 5
"""Maximum number of finding kinds that are marked, most severe first."""
SPAN = 0.9
"""Fraction of the color map in use. Its last 10 %, a light yellow, is hard to see on white."""


def plot(history: History, statistic: str, *, layers: Sequence[str] | None = None) -> Figure:
    """Draw a statistic over the run.

    Args:
        history: The run.
        statistic: Name of the statistic in the catalogue, such as `grad.l2`.
        layers: Names of the parameter tensors or activation modules to draw; all by default.

    Returns:
        A figure that a notebook shows and `savefig` writes.

    Raises:
        GradwatchError: The statistic or a layer does not exist, or matplotlib is not installed.
    """
    # before the import: a wrong name is reported even without matplotlib
    names, steps_T, values_TL = _chosen(history, statistic, layers)
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError as error:
        raise GradwatchError("plot: needs matplotlib, which is not installed here: pip install matplotlib") from error
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    plt.close(figure)  # a notebook shows the returned figure, and would show an open figure a second time
    _draw(figure, axes, names, steps_T, values_TL)
    usable_TL = values_TL[np.isfinite(values_TL)]
    # a log axis needs a positive value, and would hide negative ones
    if statistic not in LINEAR and (usable_TL > 0).any() and not (usable_TL < 0).any():
        axes.set_yscale("log")
    _broken(axes, _broken_steps(history, statistic, names, steps_T, values_TL))
    _findings(axes, [f for f in history.findings if layers is None or not f.names or set(f.names) & set(names)])
    axes.set(xlabel="optimizer step", ylabel=statistic)
    axes.set_title(history.info.name, loc="left", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:  # else nothing has a label
        figure.legend(loc="outside right upper", fontsize="small", frameon=False)
    return figure


def _chosen(
    history: History, statistic: str, layers: Sequence[str] | None
) -> tuple[tuple[str, ...], NDArray[np.int64], Floats]:
    """Return the names (L,), steps (T,) and values (T, L) to draw. A statistic of the run has an empty name."""
    known = (*history.run.statistics, *history.param.statistics, *history.act.statistics)
    if statistic not in known:
        raise GradwatchError(
            f"plot: no statistic is called '{statistic}'{did_you_mean(statistic, known)}; "
            f"the statistics are {', '.join(known)}"
        )
    table = history.table(statistic)
    steps_T, values_TL = table.series(statistic)
    if layers is None or table is history.run:
        return table.layers, steps_T, values_TL
    for name in layers:
        if name not in table.layers:
            raise GradwatchError(
                f"plot: {statistic} has no layer '{name}'{did_you_mean(name, table.layers)}; "
                f"its layers are {', '.join(table.layers)}"
            )
    return tuple(layers), steps_T, values_TL[:, [table.layers.index(name) for name in layers]]


def _draw(figure: Figure, axes: Axes, names: Sequence[str], steps_T: NDArray[np.int64], values_TL: Floats) -> None:
    """Draw a line per layer, colored from early to late."""
    import matplotlib as mpl

    colors = mpl.colormaps["viridis"](np.linspace(0, SPAN, max(2, len(names))))
    for i, name in enumerate(names):
        known_T = np.isfinite(values_TL[:, i])  # a sampled statistic has values at some steps only: connect them
        label = name if name and len(names) <= MAX_NAMED_LAYERS else None
        axes.plot(steps_T[known_T], values_TL[known_T, i], color=colors[i], linewidth=1, label=label)
    if len(names) > MAX_NAMED_LAYERS:
        scale = mpl.colors.ListedColormap(colors)
        bar = figure.colorbar(mpl.cm.ScalarMappable(cmap=scale), ax=axes, ticks=[0, 1], pad=0.01)
        bar.ax.set_yticklabels(
            [f"input: {shorten(names[0], 20)}", f"output: {shorten(names[-1], 20)}"], fontsize="small"
        )


def _broken(axes: Axes, at_T: NDArray[np.int64]) -> None:
    # at the upper edge, since no line can show a NaN
    if len(at_T):
        # the transform takes x in steps and y as a fraction of the axes
        where, red = axes.get_xaxis_transform(), COLORS[Severity.CRITICAL]
        axes.plot(at_T, np.full(len(at_T), 0.98), "x", color=red, transform=where, label="NaN or Inf", clip_on=False)


def _broken_steps(
    history: History, statistic: str, names: Sequence[str], steps_T: NDArray[np.int64], values_TL: Floats
) -> NDArray[np.int64]:
    """Return the steps at which a value was NaN or Inf."""
    broken_TL = np.isinf(values_TL)
    if statistic in EVERY_STEP:
        broken_TL |= np.isnan(values_TL)
    if statistic.startswith("grad."):
        # the norm of a broken gradient may be finite: it may be over the finite elements
        columns = [history.param.layers.index(name) for name in names]
        broken_TL |= history["grad.nonfinite"][:, columns] > 0
    return steps_T[broken_TL.any(axis=1)]


def _findings(axes: Axes, findings: Sequence[Finding]) -> None:
    """Mark the first of the most severe findings of each kind with a line at its onset."""
    first: dict[str, Finding] = {}
    for finding in sorted(findings, key=lambda f: (-f.severity, f.since)):
        first.setdefault(finding.kind, finding)
    # styles differ, since findings of one severity share a color
    styles = ("--", "-.", ":", (0, (5, 1)), (0, (1, 3)))
    for finding, style in zip(list(first.values())[:MAX_MARKED_FINDINGS], styles, strict=False):
        color = COLORS[finding.severity]
        label = f"{finding.kind}, step {finding.since:,}"
        axes.axvline(finding.since, color=color, linestyle=style, linewidth=1, label=label)
