"""Find gradients that shrink geometrically towards the input.

The size of a gradient element (root mean square) is read in each module with a weight matrix, as the median over some
steps. The output layer is left out: few units share all of the loss there, so its elements are the largest by nature.
Blocks are read in the same way, each by its largest module, because a gate may get far less than the filter next to it.
Blocks do not count if the model has several heads, because their blocks make no line.

The line must explain three quarters of the variance, and no step between two modules may hold most of the fall: a cliff
is a dead layer or a cut graph.

Parts of a model that share no layer, such as an actor and a critic, have a line each. Only modules that get gradients
at the same steps are compared: models that are trained in turn, each with its own loss, have no common depth.
"""

# T = steps, L = parameter tensors, D = modules that have a weight matrix, input side first

from __future__ import annotations

from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import Sign, format_factor, format_fold
from gradwatch.detect.features.robust_stats import Floats, median, monotone_rise
from gradwatch.detect.features.scope import module_of
from gradwatch.detect.features.structure import (
    block_levels,
    module_levels,
    module_ratio,
    structure_of,
    tower_modules,
)
from gradwatch.detect.gradients.vanishing_gradient_rules.stuck import MEDIAN_STEPS, is_stuck
from gradwatch.events import HEADS
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity

PER_MODULE = "depth.fall_per_module_decades"


def find_fall_over_depth(
    history: History,
    *,
    modules: int,
    decades: float,
    at_once: float,
    critical_decades: float,
    healing_steps: int,
    stuck_frac: float,
) -> Sign | None:
    """Return a sign for the module at the input end of a line that falls towards the input.

    Args:
        history: History of the run.
        modules: Minimum number of modules with a weight matrix, including the output layer.
        decades: Fall in powers of ten that counts if the loss is stuck.
        at_once: Fall that counts without waiting for the loss.
        critical_decades: Fall that is critical.
        healing_steps: Number of steps in which a mild fall heals by itself.
        stuck_frac: Fraction of the first loss above which the loss is stuck.
    """
    chain = structure_of(history).chain
    # cheap: half the decades at the newest step, because the median over steps may differ
    if len(chain.starts_D) < modules or module_ratio(history) < 10 ** (min(decades, at_once) / 2):
        return None
    fall, line, level_D = fall_over_depth(history, modules=modules) or (0.0, None, None)
    if line is None or level_D is None or fall < decades:
        return None
    if fall < at_once and not is_stuck(history, healing_steps=healing_steps, stuck_frac=stuck_frac):
        return None
    per_module = fall / (len(line) - 1)
    layer = module_of(history, int(chain.indices_K[chain.starts_D[np.flatnonzero(~np.isnan(level_D))[0]]]))
    return Sign(
        f"gradients shrink {format_fold(fall)} from the output to {layer}, "
        f"about {format_factor(10**per_module)}x per layer",
        (
            Quantity(key="depth.fall_decades", label="shrinkage over depth", value=fall, unit="orders of magnitude"),
            Quantity(
                key=PER_MODULE,
                label="shrinkage per layer",
                value=per_module,
                unit="orders of magnitude",
            ),
            Quantity(key="modules", value=float(len(line))),
            Quantity(key="grad.element.first", label="gradient element at the input", value=float(10 ** line[0])),
            Quantity(key="grad.element.last", label="gradient element before the output", value=float(10 ** line[-1])),
        ),
        layer=layer,
        severity=Severity.CRITICAL if fall >= critical_decades else Severity.WARNING,
    )


def fall_over_depth(history: History, *, modules: int) -> tuple[float, Floats, Floats] | None:
    """Return the fall of the steepest line over depth in powers of ten, its levels, and the level of each module.

    Returns:
        The fall and its line, and the levels of its part, of shape (D,), nan elsewhere. None if no line has `modules` -
        1 modules, or the run has fewer than 10 steps.
    """
    l2_TL = history.param.window("grad.l2", MEDIAN_STEPS)
    if len(l2_TL) < MEDIAN_STEPS or len(structure_of(history).chain.starts_D) < modules:
        return None
    all_D = module_levels(history, median(np.where(_is_in_turn(l2_TL), np.nan, l2_TL)))
    has_heads, lines = any(events_of(history, HEADS)), []
    for is_in_D in tower_modules(history):
        level_D = np.where(is_in_D, all_D, np.nan)
        levels = [all_D[is_in_D]]
        if not has_heads:
            blocks = np.unique(structure_of(history).chain.blocks_D[is_in_D])
            levels.append(block_levels(history, level_D)[blocks])
        lines += [(line[~np.isnan(line)], level_D) for line in (level[:-1] for level in levels)]  # no output layer
    long = [(line, level_D) for line, level_D in lines if len(line) >= modules - 1]
    if not long:
        return None
    return max(((monotone_rise(line), line, level_D) for line, level_D in long), key=itemgetter(0))


def _is_in_turn(l2_TL: Floats) -> NDArray[np.bool_]:
    """Return which tensors get gradients, but never at a step at which a tensor of the newest step does."""
    has_TL = ~np.isnan(l2_TL)
    is_shared_T = (has_TL & has_TL[-1]).any(1)
    in_turn_L: NDArray[np.bool_] = ~has_TL[is_shared_T].any(0)
    return in_turn_L
