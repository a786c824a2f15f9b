"""Draw a detector's examples as SVG: next to each other, a run that it reports and a run that it does not."""

# T = recorded steps, L = layers

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterator
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Detector, Example

STATISTICS = {
    "non-finite": ("grad.l2", "loss"),
    "fp16-underflow": ("grad.zero_frac",),
    "vanishing-gradient": ("grad.l2",),
    "exploding-gradient": ("grad_norm.before_clip", "loss"),
    "dead-layer": ("grad.l2",),
    "rising-sparsity": ("grad.zero_frac",),
    "oscillating-gradient": ("grad_norm.before_clip", "loss"),
    "gradient-spike": ("grad_norm.before_clip",),
    "layer-imbalance": ("grad.l2",),
    "no-gradient": ("grad.l2",),
    "dead-relu": ("act.dead_frac",),
    "saturated-activation": ("act.saturated_frac",),
    "attention-collapse": ("attention.max_logit", "attention.entropy"),
    "poor-initialization": ("weight.l2",),
    "not-optimized": ("update.ratio",),
    "learning-rate-too-high": ("weight.l2", "loss"),
    "learning-rate-too-low": ("update.ratio", "loss"),
    "missing-zero-grad": ("grad_norm.before_clip", "loss"),
    "loss-scale-collapse": ("loss_scale", "skipped"),
    "constant-batch": ("batch_hash",),
    "probabilities-into-loss": ("loss",),
    "target-leakage": ("loss",),
    "majority-class": ("loss",),
    "policy-divergence": ("policy.divergence",),
    "train-eval-mismatch": ("loss", "val_loss"),
    "overfitting": ("loss", "val_loss"),
    "loss-plateau": ("loss",),
}
"""The statistics that show a fault, by its kind. A kind that is missing here is drawn by `DEFAULT`."""
DEFAULT = ("grad.l2", "loss")
IN_ONE_CHART = ("loss", "val_loss")
LINEAR = ("act.", "attention.entropy", "grad.zero_frac", "skipped", "batch_hash")

FROM_EVENTS = ("majority-class", "probabilities-into-loss", "target-leakage", "train-eval-mismatch")
"""Kinds whose statistics look healthy: they are read from the autograd graph or the modes of modules."""

WIDTH, GAP, MARGIN = 340, 40, 56  # pixels
MAP_HEIGHT, LINE_HEIGHT, HEADING, TITLE_LINE = 150, 90, 34, 16  # pixels
MAX_TITLE_CHARS, MAX_COLUMNS = 48, 80
MAX_DECADES = 24
MIN_MAP_DECADES, MIN_LINE_DECADES = 3.0, 0.3  # less is noise, and must not look like a fault

Floats = NDArray[np.floating[Any]]


def draw(detector: type[Detector]) -> str:
    """Return the picture of a fault: the first example that fires, and one that stays quiet."""
    firing, quiet = choose_examples(detector)
    statistics = STATISTICS.get(detector.kind, DEFAULT)
    groups = [statistics] if statistics == IN_ONE_CHART else [(name,) for name in statistics]
    titles = [
        textwrap.wrap(f"{word}: {example.name}", MAX_TITLE_CHARS)
        for example, word in ((firing, "reported"), (quiet, "not reported"))
    ]
    first = TITLE_LINE * max(map(len, titles)) + 8
    parts: list[str] = []
    bottom = first
    for column, (example, title) in enumerate(zip((firing, quiet), titles, strict=True)):
        left, top = MARGIN + column * (WIDTH + GAP + MARGIN), first
        parts += [_text(left, TITLE_LINE * (i + 1) - 2, line, bold=True) for i, line in enumerate(title)]
        for names in groups:
            for name in names:
                parts += _panel(name, (firing, quiet), column, left=left, top=top, pair=names)
            is_map = np.ndim(example.history[names[0]]) == 2
            top += (MAP_HEIGHT if is_map else LINE_HEIGHT) + HEADING
        bottom = max(bottom, top)
    if detector.kind in FROM_EVENTS:
        parts.append(
            _text(MARGIN, bottom, "The curves look alike: this fault is read from the model, not from statistics.")
        )
        bottom += TITLE_LINE
    label = escape(f"{detector.kind}: {firing.name}, next to {quiet.name}", quote=True)
    size = f'viewBox="0 0 {2 * (WIDTH + MARGIN) + GAP} {bottom}"'
    head = f'<svg class="fault" xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">'
    return "\n".join([head, *parts, "</svg>"])


def choose_examples(detector: type[Detector]) -> tuple[Example, Example]:
    """Return the first example that fires, and a quiet one: a healthy run if there is one."""
    examples = list(detector.examples())
    quiet = [example for example in examples if not example.layers]
    healthy = [example for example in quiet if example.name == "a healthy run"]
    return next(example for example in examples if example.layers), (healthy or quiet)[-1]


def _panel(
    name: str, examples: tuple[Example, Example], column: int, *, left: int, top: int, pair: tuple[str, ...]
) -> Iterator[str]:
    """Yield one chart of the example in a column, on the scale of both."""
    example = examples[column]
    values = np.array(example.history[name], dtype=float)
    both = [np.asarray(each.history[n], dtype=float) for each in examples for n in pair]
    steps_T = example.history.steps(name)
    height = MAP_HEIGHT if values.ndim == 2 else LINE_HEIGHT
    title = " and ".join(pair) + (" (dashed)" if len(pair) == 2 else "")
    if values.ndim == 2:
        if name == "grad.l2":  # draws the cell as bad; a missing gradient leaves it empty
            values[np.asarray(example.history["grad.nonfinite"]) > 0] = np.inf
        yield from _map(values, _range(both, name), left=left, top=top, is_linear=name.startswith(LINEAR))
        yield _text(left - 6, top + 12, "input", anchor="end")
        yield _text(left - 6, top + height - 4, "output", anchor="end")
        title += ", faint is small"
    elif name == "batch_hash":
        yield from _marks(values, left=left, top=top)
        title = "batches: equal ones at equal heights"
    else:
        is_linear = name.startswith(LINEAR)
        yield from _line(values, steps_T, _range(both, name), left=left, top=top, name=name, is_linear=is_linear)
        title += "" if is_linear else ", log scale"
    if name == pair[0]:  # two statistics in one chart share its title
        last = int(steps_T[-1]) if len(steps_T) else 0
        yield _text(left, top + height + 14, title)
        yield _text(left + WIDTH, top + height + 14, f"step {last}", anchor="end")


def _range(arrays: list[Floats], name: str) -> tuple[float, float]:
    """Return the common scale of both runs, in powers of ten unless the statistic is a fraction."""
    if name.startswith(LINEAR):
        return 0.0, 1.0
    values = np.concatenate([array.ravel() for array in arrays])
    logs = np.log10(values[np.isfinite(values) & (values > 0)])
    if not len(logs):
        return 0.0, 1.0
    high = float(logs.max())
    low = max(float(logs.min()), high - MAX_DECADES)
    return min(low, high - (MIN_MAP_DECADES if arrays[0].ndim == 2 else MIN_LINE_DECADES)), high


def _scaled(values: Floats, scale: tuple[float, float], *, is_linear: bool) -> Floats:
    """Return values as 0 to 1 of a scale; NaN stays."""
    low, high = scale
    with np.errstate(divide="ignore", invalid="ignore"):
        placed = values if is_linear else np.log10(values)
    scaled: Floats = np.clip((placed - low) / (high - low), 0, 1)
    return scaled


def _map(values_TL: Floats, scale: tuple[float, float], *, left: int, top: int, is_linear: bool) -> Iterator[str]:
    """Yield one cell for each layer and step that was measured, the input side on top; what is missing is empty."""
    values_TL = values_TL[~np.isnan(values_TL).all(axis=1)]
    stride = max(1, math.ceil(len(values_TL) / MAX_COLUMNS))
    kept_TL = values_TL[::stride]
    size_x, size_y = WIDTH / len(kept_TL), MAP_HEIGHT / kept_TL.shape[1]
    scaled_TL = _scaled(kept_TL, scale, is_linear=is_linear)
    yield f'<rect class="frame" x="{left}" y="{top}" width="{WIDTH}" height="{MAP_HEIGHT}"/>'
    for layer in range(kept_TL.shape[1]):
        y = top + layer * size_y
        cells = [_cell(raw, part) for raw, part in zip(kept_TL[:, layer], scaled_TL[:, layer], strict=True)]
        start = 0
        for look, run in itertools.groupby(cells):  # equal neighbours become one rectangle
            length = len(list(run))
            x, width = left + start * size_x, length * size_x
            yield f'<rect {look} x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{size_y:.1f}"/>'
            start += length


def _cell(raw: float, part: float) -> str:
    if math.isnan(raw):
        return 'class="none"'
    return 'class="bad"' if math.isinf(raw) else f'class="cell" fill-opacity="{round(part, 2):g}"'


def _line(
    values_T: Floats,
    steps_T: NDArray[np.int64],
    scale: tuple[float, float],
    *,
    left: int,
    top: int,
    name: str,
    is_linear: bool,
) -> Iterator[str]:
    yield f'<rect class="frame" x="{left}" y="{top}" width="{WIDTH}" height="{LINE_HEIGHT}"/>'
    scaled_T = _scaled(values_T, scale, is_linear=is_linear)
    across_T = left + WIDTH * np.arange(len(values_T)) / max(len(values_T) - 1, 1)
    points = [(x, top + LINE_HEIGHT * (0.95 - 0.9 * y)) for x, y in zip(across_T, scaled_T, strict=True)]
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points if not math.isnan(y))
    yield f'<polyline class="{"second" if name == "val_loss" else "line"}" points="{drawn}"/>'
    for x, raw in zip(across_T, values_T, strict=True):
        if math.isnan(raw) and name == "loss":
            yield _text(x, top + LINE_HEIGHT - 6, "\N{MULTIPLICATION SIGN}", anchor="middle")


def _marks(hashes_T: Floats, *, left: int, top: int) -> Iterator[str]:
    """Yield a dot for each step, equal batches at equal heights."""
    yield f'<rect class="frame" x="{left}" y="{top}" width="{WIDTH}" height="{LINE_HEIGHT}"/>'
    kinds, place_T = np.unique(hashes_T, return_inverse=True)
    for t, place in enumerate(place_T):
        x = left + WIDTH * (t + 0.5) / len(hashes_T)
        y = top + LINE_HEIGHT * (0.5 if len(kinds) == 1 else 0.08 + 0.84 * place / (len(kinds) - 1))
        yield f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' class="head"' if bold else ""
    return f'<text{weight} x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'
