"""Read how large gradients are over the depth of a model, from its input to its output.

Depth is the order in which the modules are registered, unless the graph of the loss shows another order. Then
modules of the same depth count as one, which has the largest of their gradients.
"""

# L = parameter tensors, K = tensors of modules that have a matrix, D = modules that have one

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.robust_stats import Floats, log10
from gradwatch.detect.features.structure import structure_of
from gradwatch.events import DEPTHS, TOWERS, EventKind
from gradwatch.history.store import History

Line: TypeAlias = "list[NDArray[np.intp]]"
"""Places of modules, of shape (D,), in groups that follow each other from the input to the output."""


def module_levels(history: History, l2_L: Floats) -> Floats:
    """Return the size of a gradient element in each module with a weight matrix, as a power of ten.

    The tensor with the largest elements represents its module. The gradient of a weight is also small if its inputs are
    small, whereas the bias shows the gradient that arrives.

    Returns:
        Levels of shape (D,), input side first, nan where all norms are zero or missing.
    """
    structure = structure_of(history)
    rms_K = l2_L[structure.chain.indices_K] / structure.rms_scale_L[structure.chain.indices_K]
    return log10(np.fmax.reduceat(rms_K, structure.chain.starts_D))


def module_lines(history: History) -> list[Line]:
    """Return the modules with a weight matrix in the order of depth, for each part that shares no layer with others.

    Returns:
        A line for each part; a single one of all modules if the model has one part. Each group holds one module, or
        those of the same depth. Modules of unknown depth have a line of their own.
    """
    part_D, depth_D = _number_of_modules(history, TOWERS), _number_of_modules(history, DEPTHS)
    parts = (
        [np.arange(len(part_D))]
        if np.isnan(part_D).all()
        else [np.flatnonzero(part_D == number) for number in np.unique(part_D[~np.isnan(part_D)])]
    )
    lines: list[Line] = []
    for places in parts:
        deep, other = places[~np.isnan(depth_D[places])], places[np.isnan(depth_D[places])]
        lines += [
            [deep[depth_D[deep] == depth] for depth in np.unique(depth_D[deep])[::-1]],
            np.split(other, len(other)) if len(other) else [],
        ]
    return [line for line in lines if line]


def block_line(history: History, line: Line) -> Line:
    """Return a line with one group for each block. Parallel modules in a block share one gradient."""
    places = np.concatenate(line)
    blocks = structure_of(history).chain.blocks_D[places]
    return [places[blocks == block] for block in np.unique(blocks)]


def line_levels(level_D: Floats, line: Line) -> Floats:
    """Return the largest level of each group of a line, ignoring nan."""
    return np.array([np.fmax.reduce(level_D[places]) for places in line], np.float64)


def module_ratio(history: History) -> float:
    """Return the ratio of the largest to the smallest gradient element over the modules, at the newest step.

    A profile over depth cannot be steep if its ends are alike, and this ratio is far cheaper than the levels of a
    window. The output module is left out. The ratio is infinite if a gradient is zero or missing.
    """
    structure = structure_of(history)
    chain = structure.chain
    rms_K = history.param.newest("grad.l2")[chain.indices_K] / structure.rms_scale_L[chain.indices_K]
    rms_D = np.maximum.reduceat(rms_K, chain.starts_D)[:-1]
    low = float(rms_D.min())
    return float(rms_D.max()) / low if low > 0 else math.inf  # nan is not above 0


def _number_of_modules(history: History, kind: EventKind) -> Floats:
    """Return the number that an event gives to each module, of shape (D,); nan where it gives none."""
    chain = structure_of(history).chain
    event = next(events_of(history, kind), None)
    if event is None:
        return np.full(len(chain.starts_D), np.nan)
    number_K = np.array([event.values.get(history.info.layers[i].name, np.nan) for i in chain.indices_K])
    return np.fmax.reduceat(number_K, chain.starts_D)  # a bias has no number of its own
