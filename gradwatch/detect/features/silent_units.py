"""Report units that no longer fire, as evidence for findings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from gradwatch.history.store import History
from gradwatch.records import Quantity

DEAD_SIDE_ACTIVATIONS = ("ReLU", "ReLU6", "Threshold")
"""Activations with an exactly zero slope on one side. GELU, SiLU, ELU and LeakyReLU have a slope everywhere."""


@final
@dataclass(frozen=True, slots=True)
class SilentModule:
    """An activation module of which `count` of `units` units have not fired since step `since`."""

    name: str
    count: int
    units: int
    since: int

    def quantity(self) -> Quantity:
        """Return the count as evidence."""
        label = f"act.silent of {self.name} since step {self.since}"
        return Quantity(key="act.silent", label=label, value=float(self.count), unit=f"of {self.units} units")


def silent_units(history: History, activation: int) -> SilentModule | None:
    """Return the silent units of an activation module, or None if there are none or an older run did not record them.

    Args:
        history: Of the run.
        activation: Index of the module.
    """
    count, since, units = (
        history.act.newest(f"act.{name}")[activation] for name in ("silent", "silent_since", "units")
    )
    if not count > 0:
        return None
    return SilentModule(history.info.activations[activation].name, int(count), int(units), int(since))


def most_silent(history: History) -> int | None:
    """Return the index of the module with the largest fraction of silent units, or None if every unit fires."""
    if not history.info.activations or not len(history.act.steps(1)):
        return None
    fractions = (history.act.newest("act.silent") / history.act.newest("act.units")).tolist()
    best = max(range(len(fractions)), key=lambda i: fractions[i] if fractions[i] == fractions[i] else -1.0)
    return best if fractions[best] > 0 else None
