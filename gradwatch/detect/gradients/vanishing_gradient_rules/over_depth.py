"""Find gradients that shrink geometrically towards the input.

The size of a gradient element (root mean square) is read in each module with a weight matrix, as the median over some
steps. The output layer is left out: few units share all of the loss there, so its elements are the largest by nature.
Blocks are read in the same way, each by its largest module, because a gate may get far less than the filter next to it.
Blocks do not count if the model has several heads, because their blocks make no line, or runs its layers in another
order than they are registered.

The line must explain three quarters of the variance, and no step between two modules may hold most of the fall: a cliff
is a dead layer or a cut graph.

Parts of a model that share no layer, such as an actor and a critic, have a line each. If layers are registered in
another order than they run in, those of one depth count as one. Only modules that get gradients at the same steps are
compared: models that are trained in turn, each with its own loss, have no common depth.
"""

# T = steps, L = parameter tensors, D = modules that have a weight matrix, N = groups of them

from __future__ import annotations

from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.depth_profile import (
    Line,
    block_line,
    line_levels,
    module_levels,
    module_lines,
    module_ratio,
)
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import Sign, format_factor, format_fold
from gradwatch.detect.features.robust_stats import Floats, median, monotone_rise
from gradwatch.detect.features.scope import module_of
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.gradients.vanishing_gradient_rules.stuck import MEDIAN_STEPS, is_stuck
from gradwatch.events import DEPTHS, HEADS
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
    steepest = fall_over_depth(history, modules=modules)
    if steepest is None or steepest[0] < decades:
        return None
    fall, level_N, line = steepest
    if fall < at_once and not is_stuck(history, healing_steps=healing_steps, stuck_frac=stuck_frac):
        return None
    per_module = fall / (len(line) - 1)
    layer = module_of(history, int(chain.indices_K[chain.starts_D[line[0][0]]]))
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
            Quantity(key="grad.element.first", label="gradient element at the input", value=float(10 ** level_N[0])),
            Quantity(
                key="grad.element.last", label="gradient element before the output", value=float(10 ** level_N[-1])
            ),
        ),
        layer=layer,
        severity=Severity.CRITICAL if fall >= critical_decades else Severity.WARNING,
    )


def fall_over_depth(history: History, *, modules: int) -> tuple[float, Floats, Line] | None:
    """Return the fall of the steepest line over depth in powers of ten, its levels, and its modules.

    Returns:
        The fall, the levels of shape (N,), input side first, and the line. None if no line has `modules` - 1 modules,
        or the run has fewer than 10 steps.
    """
    l2_TL = history.param.window("grad.l2", MEDIAN_STEPS)
    if len(l2_TL) < MEDIAN_STEPS or len(structure_of(history).chain.starts_D) < modules:
        return None
    level_D = module_levels(history, median(np.where(_is_in_turn(l2_TL), np.nan, l2_TL)))
    lines = module_lines(history)
    if not any(events_of(history, HEADS)) and not any(events_of(history, DEPTHS)):
        lines += [block_line(history, line) for line in lines]
    # no output layer
    known = [[places for places in line[:-1] if not np.isnan(level_D[places]).all()] for line in lines]
    profiles = [(line_levels(level_D, line), line) for line in known if len(line) >= modules - 1]
    return max(((monotone_rise(level_N), level_N, line) for level_N, line in profiles), key=itemgetter(0), default=None)


def _is_in_turn(l2_TL: Floats) -> NDArray[np.bool_]:
    """Return which tensors get gradients, but never at a step at which a tensor of the newest step does."""
    has_TL = ~np.isnan(l2_TL)
    is_shared_T = (has_TL & has_TL[-1]).any(1)
    in_turn_L: NDArray[np.bool_] = ~has_TL[is_shared_T].any(0)
    return in_turn_L
