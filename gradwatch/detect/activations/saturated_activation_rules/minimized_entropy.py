"""Find policies that became certain because their loss adds their entropy instead of subtracting it.

The gradient of a softmax is proportional to p (1 - p), so a policy that is certain sends almost none to its layers. A
policy may also be certain because it has learned, which is why the graph of the loss must show the sign.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradwatch.detect.features.baseline import BASELINE_STEPS, first_steps
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import Sign, format_factor
from gradwatch.detect.features.robust_stats import median
from gradwatch.events import ENTROPY_MINIMIZED
from gradwatch.history.store import History
from gradwatch.records import Quantity


def find_minimized_entropy_of(history: History, *, fall: float) -> Iterator[Sign]:
    """Yield a sign for each policy whose entropy is minimized and whose gradient has fallen.

    Args:
        history: History of the run.
        fall: Minimum gradient norm of the first steps, in units of the newest ones.
    """
    for event in events_of(history, ENTROPY_MINIMIZED):
        own = [i for i, layer in enumerate(history.info.layers) if layer.module == event.layer]
        first, newest = (
            float(np.hypot.reduce(median(norm_TL[:, own])))
            for norm_TL in (first_steps(history, "grad.l2"), history.param.window("grad.l2", BASELINE_STEPS))
        )
        if newest > 0 and first >= fall * newest:
            yield Sign(
                f"the loss adds the entropy of the policy, which is now certain: the gradient of {event.layer} has "
                f"fallen {format_factor(first / newest)}-fold",
                (
                    Quantity(key="policy.fall", label="first / newest gradient norm", value=first / newest),
                    Quantity(key="grad.l2", label=f"median gradient norm of {event.layer}", value=newest),
                ),
                layer=event.layer,
            )
