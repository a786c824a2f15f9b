"""Find gradients that the epsilon of Adam outweighs: its updates are far smaller than its rate.

The first update of Adam moves each element by the rate times g / (|g| + eps), which is the rate itself unless the
gradients are smaller than eps (Kingma & Ba 2015, https://arxiv.org/abs/1412.6980, sec. 2.1). A large eps may be meant,
with a rate that makes up for it, so the updates must be small as well.
"""

# T = steps of a window, L = parameter tensors

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.baseline import first_measured_row, first_steps
from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.updates.learning_rate_too_low_rules.negligible_updates import small_update_evidence
from gradwatch.detect.updates.learning_rate_too_low_rules.update_levels import is_loss_left, update_levels
from gradwatch.history.store import History
from gradwatch.records import Quantity

ADAM = ("Adam", "AdamW")
"""Optimizers whose first update is the rate, but for eps."""


def find_outweighed_gradients(
    history: History, *, outweighed: float, useful: float, samples: int, left: float, spread: float
) -> Sign | None:
    """Return the sign of an epsilon above the gradients, while much of the loss remains.

    Args:
        history: History of the run.
        outweighed: First update over the rate, as the largest root mean square over tensors, that is too small.
        useful: Update/weight ratio from which updates are large enough all the same.
        samples: Measured updates in a row that must be smaller.
        left: Part of the first loss that must remain.
        spread: Ratio of the largest update to the median up to which all layers move alike.
    """
    if history.info.optimizer not in ADAM:
        return None
    share = _first_share(history)
    if not share < outweighed:  # or unknown
        return None
    level_T = update_levels(history, spread=spread)
    level_T = level_T[~np.isnan(level_T)][-samples:]
    rate_T = history.scalar("lr.0")
    is_rising = rate_T[-1] > rate_T[0]
    if len(level_T) < samples or is_rising or not (level_T < useful).all() or not is_loss_left(history, left=left):
        return None
    return Sign(
        f"the epsilon of {history.info.optimizer} outweighs the gradients: the first update moved the weights by at "
        f"most {100 * share:.2g} % of the learning rate",
        (
            Quantity(key="update.of_rate", label="first update / learning rate", value=share),
            *small_update_evidence(history, float(level_T.max())),
        ),
        since=int(history.steps("loss")[0]),
    )


def _first_share(history: History) -> float:
    """Return the largest first update over its rate, or nan if no tensor with a gradient has a measured one.

    Rows of an embedding that the batch does not read have no update, so embeddings do not count.
    """
    first = first_measured_row(history, "update.ratio")
    groups = {layer.group for layer in history.info.layers} - {None}
    rates = {group: first_steps(history, f"lr.{group}")[first] for group in groups}
    rate_L = np.array([rates.get(layer.group, np.nan) for layer in history.info.layers])
    is_told_L = (first_steps(history, "grad.l2")[first] > 0) & (rate_L > 0)
    is_told_L[structure_of(history).embeddings_E] = False
    with np.errstate(invalid="ignore", divide="ignore"):
        size_L = first_steps(history, "weight.l2")[first] / structure_of(history).rms_scale_L
        update_L = first_steps(history, "update.ratio")[first] * size_L
        share_L = update_L / rate_L
    return float(np.fmax.reduce(share_L[is_told_L], initial=np.nan))
