"""Find gradients that grow geometrically on their way back through the layers, the reverse of vanishing.

The size of a gradient element is read in each module except the output layer. A line through the logarithms must rise
towards the input. The levels of parallel layers, as in a mixture of experts, have no depth and make no line. Parts of a
model that share no layer have a line each. If layers are registered in another order than they run in, those of one
depth count as one.
"""

# D = modules that have a weight matrix, input side first

from __future__ import annotations

from operator import itemgetter

import numpy as np

from gradwatch.detect.features.depth_profile import Line, line_levels, module_levels, module_lines, module_ratio
from gradwatch.detect.features.finding import Sign, format_factor, format_fold
from gradwatch.detect.features.robust_stats import Floats, median, monotone_rise
from gradwatch.detect.features.scope import module_of
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.gradients.exploding_gradient_rules.climb import BLOCK_STEPS, NORM
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity


def find_growth_over_depth(history: History, *, modules: int, decades: float, critical_rise: float) -> Sign | None:
    """Return a sign for the module at the input end of a line that rises towards the input.

    Args:
        history: History of the run.
        modules: Minimum number of modules with a weight matrix.
        decades: Minimum growth over depth, in powers of ten.
        critical_rise: Growth, in units of `decades`, that is critical.
    """
    chain = structure_of(history).chain
    # cheap: half the decades at the newest step, because the median over steps may differ
    if len(chain.starts_D) < modules or module_ratio(history) < 10 ** (decades / 2):
        return None
    l2_TL = history.param.window("grad.l2", BLOCK_STEPS)
    level_D = module_levels(history, median(l2_TL))
    known = [[places for places in line[:-1] if not np.isnan(level_D[places]).all()] for line in module_lines(history)]
    long = [line for line in known if len(line) >= modules - 1]  # no output layer
    if not long:
        return None
    rise, line = max(((_rise(level_D, line), line) for line in long), key=itemgetter(0))
    # the median step must rise as well: experts in the order of their use are a line now and then
    if rise < decades or np.median([_rise(module_levels(history, l2_L), line) for l2_L in l2_TL]) < decades:
        return None
    per_module = rise / (len(line) - 1)
    layer = module_of(history, int(chain.indices_K[chain.starts_D[line[0][0]]]))
    return Sign(
        f"gradients grow {format_fold(rise)} from the output to {layer}, "
        f"about {format_factor(10**per_module)}x per layer",
        (
            Quantity(key="depth.rise_decades", label="growth over depth", value=rise, unit="orders of magnitude"),
            Quantity(
                key="depth.rise_per_module_decades",
                label="growth per layer",
                value=per_module,
                unit="orders of magnitude",
            ),
            Quantity(key=NORM, value=float(history.run.newest(NORM)[0])),
        ),
        layer=layer,
        severity=Severity.CRITICAL if rise >= critical_rise * decades else Severity.WARNING,
    )


def _rise(level_D: Floats, line: Line) -> float:
    """Return the growth along a line towards the input, in powers of ten; 0 if its levels make no line."""
    # the profile runs from the input to the output, so growth towards the input is a fall
    return -monotone_rise(line_levels(level_D, line))
