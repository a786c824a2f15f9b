"""Find batches of a single class: each batch undoes what the previous batch taught about its class.

The loss must be a cross entropy of several classes. The gradient of the output bias is then the mean over the batch of
predicted probabilities minus labels. For n random samples it falls to 1 / root n as soon as the class frequencies are
learned. Near 1, nearly all of the batch is of one class that was not predicted.

Wrong if one class stays rare for long: then the loss is below chance level, and the batches do not count.
"""

# T = steps of a window

from __future__ import annotations

import math

from gradwatch.detect.features.baseline import first_steps
from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.robust_stats import median
from gradwatch.detect.gradients.oscillating_gradient_rules.window import WINDOW_STEPS
from gradwatch.history.store import History
from gradwatch.records import Event, Quantity


def find_one_sided_batches(
    history: History, event: Event, *, one_sided: float, share: float, classes: int, samples: int
) -> Sign | None:
    """Return a sign if the batches hold one class each, and rarely the predicted class.

    Args:
        history: History of the run.
        event: Event of kind `CLASSES`.
        one_sided: Minimum gradient of the output bias, in units of the gradient of a batch of one class.
        share: Fraction of the newest steps, 0..1, at which gradient and loss must be so high.
        classes: Minimum number of classes.
        samples: Minimum number of samples per batch.
    """
    values, loss_T = event.values, history.scalar("loss", WINDOW_STEPS)
    chance_loss = _chance_loss(history, event)
    if values["samples"] < samples or values["classes"] < classes or not loss_T.max() > chance_loss > 0:
        return None
    bias = history.param.layers.index(event.layer or "")
    one_class = chance_loss / math.log(values["classes"])  # gradient of a batch of one class
    size_T = history.param.window("grad.l2", WINDOW_STEPS)[:, bias] / one_class
    is_affected_T = (size_T >= one_sided) & (loss_T >= chance_loss)
    if not is_affected_T.mean() >= share:
        return None
    return Sign(
        "most samples of a batch are of one class, and consecutive batches have different classes",
        (
            Quantity(
                key="batch.one_sided",
                label="labels minus predictions, mean over the batch",
                value=float(median(size_T)),
            ),
            Quantity(
                key="batch.one_sided_random",
                label="largest value for random samples",
                value=values["samples"] ** -0.5,
            ),
            Quantity(key="loss.chance", label="loss of random guessing", value=chance_loss),
            Quantity(key="loss.median", label="median loss of 48 steps", value=float(median(loss_T))),
        ),
    )


def _chance_loss(history: History, event: Event) -> float:
    """Return the loss of a model that has learned nothing: the first loss if its unit is unknown."""
    values = event.values
    # `nat` is above 1 if the loss is a sum over samples
    if "nat" in values:
        return math.log(values["classes"]) * values["nat"]
    return float(first_steps(history, "loss", 1)[0])
