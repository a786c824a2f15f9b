"""The live view: a few lines of text that show where a training is and how its layers fare."""

# T = recorded steps, M = layers

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.text import Text

from gradwatch.history.store import History
from gradwatch.records import Severity
from gradwatch.render import _units as units
from gradwatch.render._facts import last_known, newest, skipped, throughput
from gradwatch.render._layers import Layer, Standout, norms_now, standouts
from gradwatch.render._series import broken
from gradwatch.render._style import OK, SEVERITY
from gradwatch.render._trend import Glyphs, sparkline, strip

LABEL = 10
TOLD = 0.7
"""Powers of ten from the median at which a layer is worth a line: five times, the spread of healthy layers."""


def panel(history: History, of: Sequence[Layer], *, width: int, signs: Glyphs) -> Text:
    """Return the live view, each line at most `width` columns.

    Args:
        history: The run so far.
        of: Layers through which gradients flow, input side first.
        width: Columns of the terminal.
        signs: What it can show.
    """
    trend = max(12, min(60, width - 48))
    lines = [
        progress(history, width=width, signs=signs),
        _loss(history, trend, signs),
        _gradients(history, trend, signs),
        *_scaler(history),
        *_strip(history, of, width=width, signs=signs),
        *_matters(history, of, width=width, signs=signs),
        *_findings(history, signs),
    ]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines)


def progress(history: History, *, width: int, signs: Glyphs) -> Text:
    """Return name, bar, step, percent, time left and throughput, as far as they are known."""
    step, total = history.step + 1, history.info.total_steps
    samples_per_s, steps_per_s = throughput(history)
    speed = f"{samples_per_s:,.0f} samples/s" if samples_per_s == samples_per_s else f"{units.number(steps_per_s)}/s"
    name = units.shorten(history.info.name or "run", max(8, width // 5))
    if not total:
        return Text.assemble((name, "bold"), f"  step {step:,}  {speed}")
    left = units.duration((total - step) / steps_per_s) if steps_per_s > 0 else units.MISSING
    facts = f" {step:,}/{total:,}  {100 * step // total} %  {left} left  {speed}"
    room = max(4, width - len(name) - len(facts) - 1)
    done = min(room, room * step // total)
    tip = signs.half if done < room else ""
    bar = Text.assemble((signs.full * done + tip, OK), (signs.empty * (room - done - len(tip)), "dim"))
    return Text.assemble((name, "bold"), " ", bar, facts)


def _label(name: str) -> Text:
    return Text(f"{name:<{LABEL}}", "dim")


def _loss(history: History, trend: int, signs: Glyphs) -> Text:
    loss = newest(history, "loss")
    text = _label("loss").append(f" {'NaN' if loss != loss else units.number(loss):<9}", _alarm(loss))
    text.append(sparkline(broken(history["loss"]), width=trend, signs=signs))
    step, accuracy = last_known(history, "val_accuracy")
    val_step, val_loss = last_known(history, "val_loss")
    if max(step, val_step) >= 0:
        facts = [f"{val_loss:.3g}"] * (val_step >= 0) + [units.percent(accuracy)] * (step >= 0)
        text.append(f"  validation {', '.join(facts)}")
    return text


def _gradients(history: History, trend: int, signs: Glyphs) -> Text:
    norm, clipped = newest(history, "grad_norm.before_clip"), newest(history, "grad_norm.after_clip")
    text = _label("gradient").append(f" {'NaN' if norm != norm else units.number(norm):<9}", _alarm(norm))
    text.append(sparkline(broken(history["grad_norm.before_clip"]), width=trend, signs=signs, log=True))
    return text.append(f"  clipped to {units.number(clipped)}" if clipped < 0.999 * norm else "  total norm")


def _scaler(history: History) -> list[Text]:
    """Return a line where updates were skipped: there is something to tell."""
    count, last = skipped(history)
    if not count:
        return []
    text = _label("skipped").append(f" {units.plural(count, 'update')} of the last {len(history.run.steps())}", "bold")
    text.append(f", newest at step {last:,}")
    if history.info.loss_scaling:
        text.append(f"  loss scale {newest(history, 'loss_scale'):,.6g}")
    return [text]


def _strip(history: History, of: Sequence[Layer], *, width: int, signs: Glyphs) -> list[Text]:
    if not of:
        return []
    bars, top = strip(norms_now(history, of), width=max(8, min(len(of), width - LABEL - 46)), signs=signs)
    text = _label("layers").append(" in ", "dim").append_text(bars).append(" out", "dim")
    return [text.append(f"  top {units.number(top)}, 10x less per notch", "dim")]


def _matters(history: History, of: Sequence[Layer], *, width: int, signs: Glyphs) -> list[Text]:
    """Return a line for each of the few layers that stand out most."""
    told = [s for s in standouts(history, of) if s.interest >= TOLD][:3]
    room = max(12, min(44, width - 44))
    lines = []
    for i, found in enumerate(told):
        text = _label("watch" if i == 0 else "")
        text.append(f" {units.shorten(found.layer.name, room):<{min(room, 24)}}", "bold")
        lines.append(text.append(f"  {_words(found)}"))
    return lines


def _words(found: Standout) -> str:
    if found.what == "rising zeros":
        return f"zero gradients up by {units.percent(found.value)}"
    if found.what not in ("largest", "smallest"):
        return found.what
    ratio = found.value if found.value >= 1 else 1 / found.value
    return f"gradient {units.number(ratio, digits=2)}x {'above' if found.value >= 1 else 'below'} the median layer"


def _findings(history: History, signs: Glyphs) -> list[Text]:
    """Return how many findings there are, by severity, and the newest of the gravest."""
    if not history.findings:
        return []
    text = _label("findings").append(" ")
    for severity in reversed(Severity):
        count = sum(f.severity == severity for f in history.findings)
        if count:
            text.append(f"{signs.marks[severity]} {count} {severity}  ", SEVERITY[severity])
    worst = max(history.findings, key=lambda f: (f.severity, f.step))
    return [text.append(f"{worst.kind} in {worst.layer or 'the run'}, step {worst.step:,}")]


def _alarm(value: float) -> str:
    return "bold" if np.isfinite(value) else SEVERITY[Severity.CRITICAL]
