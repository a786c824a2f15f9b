"""Find gradients that grow on their way back through successive uses of one parameter.

A forward pass applies one parameter repeatedly to its own result, as cells in a loop and equation solvers do.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import Sign, format_fold
from gradwatch.events import RECURRENCE
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity


def find_growth_over_time(history: History, *, decades: float, critical_growth: float) -> Iterator[Sign]:
    """Yield a sign for each parameter if the gradient grows over its uses by at least `decades`.

    Args:
        history: History of the run.
        decades: Minimum growth from the last use to the first, in powers of ten.
        critical_growth: Growth, in units of `decades`, that is critical.
    """
    for event in events_of(history, RECURRENCE):
        growth, uses = event.values["growth"], event.values["uses"]
        if growth < decades:
            continue
        yield Sign(
            f"the gradient grows {format_fold(growth)} through {uses:.0f} consecutive uses of {event.layer}",
            (
                Quantity(
                    key="recurrence.growth_decades",
                    label="growth from the last use to the first",
                    value=growth,
                    unit="orders of magnitude",
                ),
                Quantity(
                    key="recurrence.factor_per_use",
                    label="growth at each use",
                    value=10 ** (growth / uses),
                    unit="times",
                ),
            ),
            layer=event.layer,
            severity=Severity.CRITICAL if growth >= critical_growth * decades else Severity.WARNING,
        )
