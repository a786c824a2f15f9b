"""Find weights that have shrunk to nothing while the loss is that of the start: a decay outweighs the gradient.

With half of the weight matrices at a hundredth of their first norms, the outputs no longer depend on the inputs, unless
the model normalizes. A model that normalizes may learn with small weights, so the loss must not have fallen.
"""

# W = weights that a learning rate is chosen for

from __future__ import annotations

from gradwatch.detect.data_and_loss.loss_plateau_rules.progress import WINDOW_STEPS, loss_evidence
from gradwatch.detect.features.baseline import first_measured, newest_loss
from gradwatch.detect.features.finding import Sign, format_fold
from gradwatch.detect.features.robust_stats import Floats, log10, median
from gradwatch.detect.features.structure import structure_of
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity

SHRUNK = "weight.l2.shrunk_decades"


def find_collapsed_weights(history: History, *, shrunk: float) -> Sign | None:
    """Return a sign if half of the weight matrices are a small part of what they were at the first step.

    Args:
        history: History of a run whose loss has not fallen.
        shrunk: Newest norm of a weight matrix in units of its first norm, at most, as the median over matrices.
    """
    indices_W = structure_of(history).rate_weights.indices_W
    first_W: Floats = first_measured(history, "weight.l2")[indices_W]
    newest_W: Floats = history.param.newest("weight.l2")[indices_W]
    # cheap, and False for nan: most steps measure no weights; one that begins or ends at 0 has no ratio
    if not len(indices_W) or not (newest_W <= first_W).all() or not newest_W.all():
        return None
    decades = float(median(log10(first_W) - log10(newest_W)))
    if 10**-decades > shrunk:
        return None
    return Sign(
        f"the weights have shrunk {format_fold(decades)}, and the loss is "
        f"{newest_loss(history, WINDOW_STEPS):.4g} after {history.step} steps",
        (
            Quantity(
                key=SHRUNK, label="median shrinkage of a weight matrix", value=decades, unit="orders of magnitude"
            ),
            Quantity(key="weight.l2.median", label="median weight.l2", value=float(median(newest_W))),
            *loss_evidence(history),
        ),
        since=int(history.steps("loss")[0]),
        severity=Severity.WARNING,
    )
