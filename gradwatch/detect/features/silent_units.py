"""What is remembered of units that do not fire any more, as evidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from gradwatch.history.store import History
from gradwatch.records import Quantity

HAVE_A_DEAD_SIDE = ("ReLU", "ReLU6", "Threshold")
"""Activations whose gradient is exactly zero on one side. GELU, SiLU, ELU and LeakyReLU leave some everywhere."""


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
    """Return how many units of an activation module are silent, or None if none is or an older run did not record it.

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
    """Return the index of the module with the largest part of its units silent, or None where no unit is."""
    if not history.info.activations or not len(history.act.steps(1)):
        return None
    parts = (history.act.newest("act.silent") / history.act.newest("act.units")).tolist()
    best = max(range(len(parts)), key=lambda i: parts[i] if parts[i] == parts[i] else -1.0)
    return best if parts[best] > 0 else None
