"""Draw the live view: a few lines of text with the progress of a training and its layers."""

# T = recorded steps, M = layers

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from gradwatch.history.store import History
from gradwatch.records import Finding, Severity
from gradwatch.render.common import format as units
from gradwatch.render.common.layers import Layer, norms_now, worst_finding
from gradwatch.render.common.run_events import WITHDRAWN
from gradwatch.render.common.run_stats import newest, skipped, throughput
from gradwatch.render.common.series import nan_as_inf
from gradwatch.render.common.sparkline import LEVELS, UNICODE, Glyphs, column, sparkline, strip
from gradwatch.render.common.style import OK, SEVERITY, mark

Floats = NDArray[np.floating[Any]]

LABEL = 10  # columns of a label
BAR = 60
"""Maximum columns of the progress bar."""
MIN_BAR, MIN_NAME = 12, 8
"""Minimum columns of the progress bar, for which the name is cut, and of the name, which is left out below them."""
CELL = 4
"""Maximum columns of a layer in the strip."""
ROOMY = 100
"""Minimum columns of a terminal in which the legend of the strip explains its scale."""
SPIKE = 100.0
"""Largest loss, in units of the median, above which the loss is drawn on a log scale."""
NEWEST = 3
"""Number of newest kinds of findings to show."""
DATE = re.compile(r"-\d{8}-\d{6}")  # default names of runs end with date and time


def panel(history: History, of: Sequence[Layer], *, width: int, signs: Glyphs) -> Text:
    """Return the live view, with lines of at most `width` columns.

    Args:
        history: The run so far.
        of: Layers through which gradients flow, input side first.
        width: Columns of the terminal.
        signs: Glyphs that the terminal can show.
    """
    trend = max(12, min(100, width - 60))  # 60 columns for label, value, validation metrics and learning rate
    lines = [
        progress(history, width=width, signs=signs),
        _loss(history, trend, signs),
        _gradients(history, trend, signs),
        *_scaler(history),
        *_strip(history, of, width=width, signs=signs),
        *_findings(history, width=width, signs=signs),
    ]
    # the ellipsis is not ASCII
    for line in lines:
        line.truncate(width, overflow="ellipsis" if signs is UNICODE else "crop")
    return Text("\n").join(lines)


def progress(history: History, *, width: int, signs: Glyphs) -> Text:
    """Return a line with name, epoch, bar, step, percent, time left and throughput, as far as known."""
    step, total = history.step + 1, history.info.total_steps
    samples_per_s, steps_per_s = throughput(history)
    # a loop that passes no batch has no samples: `x == x` is false for nan
    speed = f"{samples_per_s:,.0f} samples/s" if samples_per_s == samples_per_s else f"{units.number(steps_per_s)}/s"
    epoch = _epoch(history)
    if not total:
        name = _name(history, width // 4)
        return Text.assemble((name, "bold"), "  " * bool(name), f"{epoch}step {step:,}  {speed}")
    left = units.duration(max(total - step, 0) / steps_per_s) if steps_per_s > 0 else units.MISSING
    numbers = f" {step:,}/{total:,}  {100 * step // total} %  {left} left  {speed}"
    free = width - len(numbers) - len(epoch)
    name = _name(history, min(width // 4, free - MIN_BAR - 1))
    before = f"{name} " if name else ""
    room = max(4, min(BAR, free - len(before)))
    done = min(room, room * step // total)
    tip = signs.half if done < room else ""  # a full bar has no tip
    bar = Text.assemble((signs.full * done + tip, OK), (signs.empty * (room - done - len(tip)), "dim"))
    return Text.assemble((before, "bold"), epoch, bar, numbers)


def _name(history: History, room: int) -> str:
    """Return the name of the run in at most `room` columns; an empty string if too little of it would remain."""
    name = history.info.name or "run"
    # the view shows a single run, so its date may go
    short = name if len(name) <= room else DATE.sub("", name)
    if len(short) <= room:
        return short
    return f"{short[: room - 1]}~" if room >= MIN_NAME else ""


def _epoch(history: History) -> str:
    """Return the number of the epoch, and of all epochs if known, such as `epoch 2/15  `."""
    per_epoch, total = history.info.steps_per_epoch, history.info.total_steps
    if not per_epoch:
        return ""
    of = f"/{math.ceil(total / per_epoch):,}" if total else ""
    return f"epoch {max(history.step, 0) // per_epoch + 1:,}{of}  "


def _label(name: str) -> Text:
    return Text.assemble((f"{name:<{LABEL}}", "dim"))


def _loss(history: History, trend: int, signs: Glyphs) -> Text:
    loss = newest(history, "loss")
    text = _label("loss").append(f" {units.value(loss):<9}", _alarm(loss))
    loss_T = history["loss"]
    # padded, so that the metrics stay in place while a short trend grows
    text.append(sparkline(nan_as_inf(loss_T), width=trend, signs=signs, log=_is_spiky(loss_T)).ljust(trend))
    for metric, shown in (("val_loss", units.value), ("val_accuracy", units.percent)):
        step, measured = history.latest_validation(metric)
        text.append(f"  {metric} {shown(measured)}" if step >= 0 else "")
    return text


def _is_spiky(loss_T: Floats) -> bool:
    """Return whether a spike would flatten the rest of the losses on a linear scale."""
    finite_T = loss_T[np.isfinite(loss_T)]
    # a loss that may be negative has no logarithm
    return bool(finite_T.size and finite_T.min() > 0 and finite_T.max() > SPIKE * np.median(finite_T))


def _gradients(history: History, trend: int, signs: Glyphs) -> Text:
    norm, clipped = newest(history, "grad_norm.before_clip"), newest(history, "grad_norm.after_clip")
    text = _label("gradient").append(f" {units.value(norm):<9}", _alarm(norm))
    norms = sparkline(nan_as_inf(history["grad_norm.before_clip"]), width=trend, signs=signs, log=True)
    text.append(norms.ljust(trend))
    # 0.999: the two norms differ by rounding even if nothing is clipped
    text.append(f"  clipped to {units.number(clipped)}" if clipped < 0.999 * norm else "  total norm")
    rate = newest(history, "lr.0")
    return text.append(f"  lr {units.number(rate)}" if np.isfinite(rate) else "")


def _scaler(history: History) -> list[Text]:
    """Return a line about skipped updates and the loss scale, or no line if there is nothing to report."""
    count, last = skipped(history)
    scale_T = history.scalar("loss_scale")
    moved = history.info.loss_scaling and len(scale_T) > 0 and scale_T[0] != scale_T[-1]
    if not count and not moved:
        return []
    text = _label("updates").append(" ")
    if count:
        summary = f"{units.plural(count, 'update')} of the last {len(scale_T)} skipped, newest at step {last:,}"
        text.append(f"{summary}  ", SEVERITY[Severity.WARNING])
    if history.info.loss_scaling:
        was = f", was {scale_T[0]:,.6g}" if moved else ""
        text.append(f"loss scale {scale_T[-1]:,.6g}{was}")
    return [text]


def _strip(history: History, of: Sequence[Layer], *, width: int, signs: Glyphs) -> list[Text]:
    """Return a line with one bar per layer, and below it the signs of the layers with findings."""
    if not of:
        return []
    # 48 columns for the words around the strip and its legend
    room = max(8, width - LABEL - 48)
    bars = min(len(of), room)
    cell = max(1, min(CELL, room // bars))
    norms_M = norms_now(history, of)
    drawn, top = strip(norms_M, width=bars, signs=signs, cell=cell)
    text = _label("layers").append(" input ", "dim").append_text(drawn).append(" output", "dim")
    scale = ", 10x per level" if width >= ROOMY else ""
    legend = [f"top {units.number(top)}{scale}"] if np.isfinite(top) else []
    legend += [f"{sign} {word}" for sign, word in _odd(norms_M, top, signs) if sign in drawn.plain]
    lines = [text.append("  " + "  ".join(legend), "dim")]
    return lines + _marks(history, of, bars=bars, cell=cell, signs=signs)


def _marks(history: History, of: Sequence[Layer], *, bars: int, cell: int, signs: Glyphs) -> list[Text]:
    worst = [worst_finding(layer, history.findings) for layer in of]
    graves: dict[int, Severity] = {}
    for m, finding in enumerate(worst):
        if finding:
            # several layers may share a column: it shows the worst of them
            place = column(m, len(of), bars)
            graves[place] = max(finding.severity, graves.get(place, finding.severity))
    if not graves:
        return []
    text = Text(" " * (LABEL + len(" input ")))  # below the first bar of the strip
    for place in range(max(graves) + 1):
        text.append_text(mark(graves[place], signs) if place in graves else Text(" ")).append(" " * (cell - 1))
    return [text]


def _odd(norms_M: Floats, top: float, signs: Glyphs) -> tuple[tuple[str, str], ...]:
    """Return the signs of the strip that are not bars, with their meanings."""
    # the strip draws a norm below its lowest level as zero, so the legend must not claim exactly 0
    floor = top * 10.0**-LEVELS
    is_tiny = bool(((norms_M > 0) & (norms_M <= floor)).any())
    low = f"under {units.number(floor, digits=2)}" if is_tiny else "zero"
    return (signs.broken, "NaN"), (signs.zero, low), (signs.absent, "none")


def _findings(history: History, *, width: int, signs: Glyphs) -> list[Text]:
    """Return a line with the number of findings by severity, and a line for each of the newest kinds of findings."""
    if not history.findings and not history.withdrawn:
        return []
    text = _label("findings").append(" ")
    for severity in reversed(Severity):
        count = sum(f.severity == severity for f in history.findings)
        if count:
            text.append(f"{signs.marks[severity]} {count:,} {severity}  ", SEVERITY[severity])
    if history.withdrawn:
        text.append(f"{len(history.withdrawn):,} {WITHDRAWN}", "dim")
    by_kind: dict[str, list[Finding]] = {}
    for finding in sorted(history.findings, key=lambda f: f.step):
        by_kind.setdefault(finding.kind, []).append(finding)
    # the slice takes the newest kinds, newest first
    shown = list(by_kind.values())[: -NEWEST - 1 : -1]
    return [text, *(_kind(of, width, signs) for of in shown)]


def _kind(of: Sequence[Finding], width: int, signs: Glyphs) -> Text:
    """Return a line about the findings of one kind: the most severe one, and the number of the others."""
    worst = max(of, key=lambda f: f.severity)  # of several, the first
    line = Text(" " * (LABEL + 1)).append_text(mark(worst.severity, signs)).append(f" step {worst.since:<6,} ")
    line.append(f"{worst.code} {worst.kind}", SEVERITY[worst.severity])
    more = f" and {len(of) - 1:,} more" if len(of) > 1 else ""
    place = worst.place if worst.names else "whole run"
    return line.append(f"  {units.shorten(place, max(12, width - 56 - len(more)))}{more}")


def _alarm(value: float) -> str:
    return "bold" if np.isfinite(value) else SEVERITY[Severity.CRITICAL]
