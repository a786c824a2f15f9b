"""Find gradients that vanish on their way back through the uses of one parameter, if nothing is learned.

A forward pass applies one parameter repeatedly to its own result. Only a plateau of the loss makes this a fault: the
distant past of a sequence need not matter.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import Sign, format_fold
from gradwatch.events import RECURRENCE
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity

PLATEAU = "loss-plateau"
"""Kind of finding for a run that learns nothing."""


def has_plateau(history: History, *, least: Severity) -> bool:
    """Return whether the run was found to learn nothing, with a finding of this severity at least."""
    return any(finding.kind == PLATEAU and finding.severity >= least for finding in history.findings)


def find_fall_over_time(history: History, *, decades: float) -> Iterator[Sign]:
    """Yield a sign for each parameter if the gradient shrinks over its uses by at least `decades`."""
    # without a plateau the run does not need the distant past
    if not has_plateau(history, least=Severity.WARNING):
        return
    for event in events_of(history, RECURRENCE):
        fall, uses = -event.values["growth"], event.values["uses"]
        if fall < decades:
            continue
        yield Sign(
            f"the loss does not fall, and gradients shrink {format_fold(fall)} through "
            f"{uses:.0f} uses of {event.layer}",
            (
                Quantity(
                    key="recurrence.fall_decades",
                    label="fall from the last use to the first",
                    value=fall,
                    unit="orders of magnitude",
                ),
                Quantity(
                    key="recurrence.factor_per_use",
                    label="factor of each use",
                    value=10 ** (-fall / uses),
                    unit="times",
                ),
            ),
            layer=event.layer,
            severity=Severity.WARNING,
        )
