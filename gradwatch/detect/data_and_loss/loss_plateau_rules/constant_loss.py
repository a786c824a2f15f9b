"""Find a loss that is the same for every batch: the outputs no longer depend on the inputs.

Losses of different batches differ, by the noise of their samples, as long as the model tells samples apart. A loss of
distances or similarities stops differing once all outputs are one point: a triplet loss stays at its margin, and a
contrastive loss at the logarithm of the number of candidates. Both may be well below the first loss, which fell while
the outputs collapsed.

Not judged: loops that do not pass their batches, batches that are equal, and losses with little left to lose.
"""

# T = steps of a window

from __future__ import annotations

import numpy as np

from gradwatch.detect.data_and_loss.loss_plateau_rules.progress import WINDOW_STEPS, loss_evidence
from gradwatch.detect.features.baseline import first_loss, first_steps
from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.robust_stats import Floats, median
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity


def find_constant_loss(history: History, *, constant: float, left: float, first: float, batches: float) -> Sign | None:
    """Return a sign if the losses of different batches differ by less than a fraction of themselves.

    Args:
        history: History of the run.
        constant: Spread of the newest losses, as a fraction of the loss, up to which they are the same.
        left: Part of the first loss that must be left.
        first: Spread of the first losses, in units of the newest spread, at least.
        batches: Part of the batches of the window that must be different ones.
    """
    loss_T = history.scalar("loss", WINDOW_STEPS)
    level, spread = float(median(loss_T)), _spread(loss_T)
    if len(loss_T) < WINDOW_STEPS or not spread <= constant * abs(level):
        return None
    if not level > left * first_loss(history) or _spread(first_steps(history, "loss")) < first * spread:
        return None
    hash_T = history.scalar("batch_hash", WINDOW_STEPS)
    if np.isnan(hash_T).any() or len(set(hash_T.tolist())) < batches * len(hash_T):
        return None
    text = f"the loss is {level:.4g} for every batch: the outputs no longer depend on the inputs"
    evidence = (Quantity(key="loss.spread", label="spread of the loss, newest 48 steps", value=spread),)
    return Sign(text, (*loss_evidence(history), *evidence), severity=Severity.WARNING)


def _spread(loss_T: Floats) -> float:
    """Return the distance of the 90 % quantile from the 10 % quantile."""
    sorted_T = np.sort(loss_T)
    tenth = len(sorted_T) // 10
    return float(sorted_T[-1 - tenth] - sorted_T[tenth])
