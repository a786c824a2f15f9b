"""Find a loss that fell only by what a constant prediction can learn: the target mean or the class frequencies.

For cross entropies and squared errors of the model's output, the gradient of that output reveals the targets. The probe
checks whether predictions fit their own sample better than any other sample of the batch. It reports a misfit if eight
checks in a row show together that pairing explains less than 0.03 of the loss that a constant leaves, and if the trend
of all checks is sure to lead nowhere. Few samples, or a slow start, leave it unclear.

If a class is rare and never predicted, the sign is for information. What can be known of rare and noisy labels may be
that little: the best model of clicks removes a few percent of the entropy of their frequency.
"""

# E = embeddings

from __future__ import annotations

import numpy as np

from gradwatch.detect.data_and_loss.loss_plateau_rules.progress import WINDOW_STEPS, make_sign
from gradwatch.detect.features.events import majority_event
from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.robust_stats import median
from gradwatch.detect.features.structure import structure_of
from gradwatch.events import PAIRED, UNCLEAR, UNPAIRED
from gradwatch.history.store import History
from gradwatch.records import Severity


def find_constant_predictions(history: History, *, patience: int, travel: float) -> Sign | None:
    """Return a sign if the last check found that predictions fit other samples as well as their own.

    Args:
        history: History of the run.
        patience: Steps for which the rows of each embedding must have learned. If a batch reads a third of the rows,
            each row learns in a third of the steps.
        travel: Sum of the update/weight ratios of the window below which the sign is for information.
    """
    if newest_check(history) != UNPAIRED.name or history.step * _min_read_frac(history) < patience:
        return None
    sign = make_sign(history, "predictions fit other samples as well as their own", travel=travel)
    if (event := majority_event(history)) is None:
        return sign
    why = f"only {100 * (1 - event.values['share']):.2g} % of the labels are not class {event.values['class']:.0f}"
    return sign._replace(message=f"{sign.message}; {why}, so little may be predictable", severity=Severity.INFO)


def newest_check(history: History) -> str | None:
    """Return the kind of the newest event on whether predictions fit, or None if that was not seen or is usual."""
    kinds = (UNPAIRED.name, PAIRED.name, UNCLEAR.name)
    # the newest check counts: predictions that began to fit end the suspicion
    return next((e.kind for e in reversed(history.events) if e.kind in kinds and e.step <= history.step), None)


def _min_read_frac(history: History) -> float:
    """Return the fraction of rows that a batch reads of an embedding, for the least read embedding."""
    zero_frac_TE = history.param.window("grad.zero_frac", WINDOW_STEPS)[:, structure_of(history).embeddings_E]
    # rows without gradient were not read; `initial` serves a model without embeddings
    return 1 - float(np.fmax.reduce(median(zero_frac_TE), initial=0.0))
