"""What is remembered of units that do not fire any more, as evidence."""

from __future__ import annotations

from gradwatch.history.store import History
from gradwatch.records import Quantity

HAVE_A_DEAD_SIDE = ("ReLU", "ReLU6", "Threshold")
"""Activations whose gradient is exactly zero on one side. GELU, SiLU, ELU and LeakyReLU leave some everywhere."""


def silent_units(history: History, activation: int) -> tuple[Quantity, ...]:
    """Return how many units of an activation module have not fired since which step, or nothing where none is silent.

    Args:
        history: Of the run; one of an older gradwatch does not tell.
        activation: Index of the module.
    """
    silent, since, units = (
        history.act.newest(f"act.{name}")[activation] for name in ("silent", "silent_since", "units")
    )
    if not silent > 0:
        return ()
    name = f"act.silent of {history.info.activations[activation].name} since step {since:.0f}"
    return (Quantity(name=name, value=float(silent), unit=f"of {units:.0f} units"),)


def most_silent(history: History) -> int | None:
    """Return the index of the module with the largest part of its units silent, or None where no unit is."""
    if not history.info.activations or not len(history.act.steps(1)):
        return None
    parts = (history.act.newest("act.silent") / history.act.newest("act.units")).tolist()
    best = max(range(len(parts)), key=lambda i: parts[i] if parts[i] == parts[i] else -1.0)
    return best if parts[best] > 0 else None
