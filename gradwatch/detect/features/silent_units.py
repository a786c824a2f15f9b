"""Report units that no longer fire, as evidence for findings."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from gradwatch.detect.features.routing import routings
from gradwatch.history.store import History
from gradwatch.records import Quantity

DEAD_SIDE_ACTIVATIONS = ("ReLU", "ReLU6", "Threshold")
"""Activations with a slope of exactly zero on one side. GELU, SiLU, ELU and LeakyReLU have a slope everywhere."""


class SilentModule(NamedTuple):
    """An activation module and the number of its units that have not fired since step `since`."""

    name: str
    num_silent: int
    num_units: int
    since: int

    def quantity(self) -> Quantity:
        label = f"act.silent of {self.name} since step {self.since}"
        return Quantity(key="act.silent", label=label, value=float(self.num_silent), unit=f"of {self.num_units} units")


def silent_units(history: History, activation: int) -> SilentModule | None:
    """Return the silent units of an activation module, or None if there are none or an older run did not record them.

    Args:
        history: History of the run.
        activation: Index of the module.
    """
    statistics = ("act.silent", "act.units", "act.silent_since")
    count, units, since = (history.act.newest(name)[activation] for name in statistics)
    name = history.info.activations[activation].name
    # False for nan, the count of an older run
    is_known = count > 0 and math.isfinite(count + units + since)
    return SilentModule(name, int(count), int(units), int(since)) if is_known else None


def most_silent(history: History) -> SilentModule | None:
    """Return the module with the largest fraction of silent units, or None if every unit fires."""
    if not history.info.activations or not len(history.act.steps(1)):
        return None
    fraction_A = history.act.newest("act.silent") / history.act.newest("act.units")
    fraction_A[list(routings(history))] = 0  # experts are chosen, and are not units that fire
    # nan would win `argmax`
    return silent_units(history, int(np.argmax(np.nan_to_num(fraction_A))))
