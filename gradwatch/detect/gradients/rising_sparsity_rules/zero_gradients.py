"""Find modules with gradients that get sparser: more and more elements are zero in every batch.

The zeros are read where one element stands for one unit: in the bias, or in the weight of a module without a bias. A
bias counts only if its weights have as many zeros. A loss that is a difference gives a bias no gradient where both
sides give the same answer. An embedding counts only if its rows are codes, which the model chooses: the words in a
batch depend on the data.
"""

# T = steps of a window, B = blocks of it, L = parameter tensors

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.baseline import first_steps, is_learned
from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.robust_stats import Floats
from gradwatch.detect.features.scope import affected_modules
from gradwatch.detect.features.silent_units import most_silent
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.gradients.rising_sparsity_rules.envelope import BLOCK_STEPS, CreepBounds
from gradwatch.events import CODEBOOK
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity


def find_sparser_gradients(history: History, bounds: CreepBounds, *, kind: str, shared_zeros: float) -> Iterator[Sign]:
    """Yield a sign for each module with a gradient that gets sparser.

    Args:
        history: History of the run.
        bounds: Thresholds of the fraction of zeros.
        kind: Kind of the resulting findings.
        shared_zeros: Minimum zeros of a layer's weights, over the zeros of its bias, at which its units are silent.
    """
    newest_L = history.param.newest("grad.zero_frac")
    # a gradient of only zeros is the case of `dead-layer` and `no-gradient`
    maybe_L = (newest_L >= bounds.level) & (newest_L < 1)
    if not maybe_L.any():
        return
    maybe_L &= _is_per_unit(history)
    zero_TL = history.param.window("grad.zero_frac")
    # not the steps before: a layer that settles at once has far fewer zeros at step 0, which is not a trend
    first_L = first_steps(history, "grad.zero_frac", BLOCK_STEPS)[BLOCK_STEPS // 2 :].min(axis=0)
    low_L = zero_TL[-BLOCK_STEPS:].min(axis=0)
    maybe_L &= bounds.is_high(low_L, first_L)
    for i in np.flatnonzero(maybe_L).tolist():
        maybe_L[i] = not _is_cancelled(history, i, low_L, shared_zeros=shared_zeros)
    if not maybe_L.any():
        return
    maybe = np.flatnonzero(maybe_L)
    first_L = first_L[maybe]
    whole = len(zero_TL) // BLOCK_STEPS
    # whole blocks only, the last of which ends at the newest step
    low_BL = zero_TL[len(zero_TL) - whole * BLOCK_STEPS :, maybe].reshape(whole, BLOCK_STEPS, -1).min(axis=1)
    affected_L = np.zeros(len(newest_L), np.bool_)
    affected_L[maybe] = bounds.is_rising(low_BL) & bounds.is_creeping(low_BL, first_L)
    for layer, group in affected_modules(history, affected_L, kind=kind):
        mine = np.isin(maybe, group)
        yield _sign(history, bounds, layer, low_BL[:, mine], rise=float((low_BL[-1] - first_L)[mine].max()))


def _sign(history: History, bounds: CreepBounds, layer: str | None, low_BL: Floats, *, rise: float) -> Sign:
    low_B = low_BL.mean(axis=1)
    percent = 100 * low_B[-1]
    silent = most_silent(history)
    return Sign(
        f"the gradient of {layer or 'the whole model'} gets sparser: {percent:.0f} % of its elements are always zero",
        (
            Quantity(key="grad.zero_frac", value=float(low_B[-1]), unit="0..1"),
            Quantity(key="zero_frac.rise", label="rise since steps 8 to 15", value=rise, unit="0..1"),
            Quantity(
                key="grad.zero_frac.before",
                label=f"grad.zero_frac {BLOCK_STEPS * (len(low_B) - 1)} steps before",
                value=float(low_B[0]),
                unit="0..1",
            ),
            *((silent.quantity(),) if silent else ()),
        ),
        layer=layer,
        severity=Severity.INFO if is_learned(history, left=bounds.left) else None,
    )


def _is_per_unit(history: History) -> NDArray[np.bool_]:
    """Return for which tensors an element, or a row of a codebook, stands for one unit."""
    codes = {event.layer for event in history.events if event.kind == CODEBOOK.name}
    is_per_unit_L = structure_of(history).is_per_unit_L
    if not codes:
        return is_per_unit_L
    return is_per_unit_L | np.array([layer.name in codes for layer in history.info.layers], np.bool_)


def _is_cancelled(history: History, tensor: int, zero_L: Floats, *, shared_zeros: float) -> bool:
    """Return whether a bias has zeros that its weights lack: its gradient cancels out, and its units live."""
    own = history.info.layers[tensor]
    mates = [i for i, la in enumerate(history.info.layers) if la.module == own.module and len(la.shape) >= 2]
    if len(own.shape) != 1 or not mates:
        return False
    return bool(zero_L[mates].max() < shared_zeros * zero_L[tensor])
