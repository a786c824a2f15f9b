"""Two histories side by side: the first step at which they part, and the layers whose gradients differ most."""

# T = steps that both keep, S = statistics that both have, L = layers that both have

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from gradwatch import catalogue
from gradwatch.history.store import Floats, History, Table

CANCELLING = ("grad.mean", "act.mean")
"""Means of numbers of both signs: what is left of them may be rounding alone, so they tell no difference beyond it."""
EXACT = ("batch_hash",)
"""Statistics that are equal or not: there is no rounding in them."""
HISTORY_DEPENDENT = ("act.silent", "act.silent_since")
"""Statistics that depend on all earlier samples: they may differ after a step that only one side sampled."""
ORDER = ("batch_hash", "lr.", "weight.l2", "loss", "act.", "grad.", "grad_norm.", "loss_scale", "skipped", "update.")
"""What comes first within a step: of several statistics that part at one, the earliest of these tells why."""
ROUNDOFF = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-9}  # IEEE 754, table 3.5; bfloat16 has 8 bits
SUMMED, STORED = 2.0**10, 2.0**3
"""Roundings that a number has gone through: sums in fp32 of some thousand terms in any order, and values stored in the
format of the forward pass through some tens of layers; their errors grow with the root of their number (N. Higham,
Accuracy and Stability of Numerical Algorithms, 2nd ed., sec. 2.8), so this is generous."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """The first step at which two histories differ.

    Args:
        step: Optimizer step.
        statistic: What differs there; of several, what comes first within a step.
        layer: Parameter tensor or activation module, or None for the run.
        first: Value in the first run.
        second: Value in the second.
        others: How many statistics of layers and run differ at that step besides.
    """

    step: int
    statistic: str
    layer: str | None
    first: float
    second: float
    others: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GradientGap:
    """How far the gradients of a layer are apart.

    Args:
        layer: Parameter tensor.
        decades: Median over the common steps of the power of ten between the norms, the second over the first; infinite
            where one of them is zero.
        spread: Median of its size: noise that changes its sign is in it, but not in `decades`.
    """

    layer: str
    decades: float
    spread: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """A recorded number that differs when its step runs again.

    Args:
        step: Optimizer step.
        statistic: As in the catalogue.
        layer: Parameter or module, or an empty string for the run.
        recorded: The recorded value.
        again: The value of the rerun.
    """

    step: int
    statistic: str
    layer: str
    recorded: float
    again: float

    @property
    def relative(self) -> float:
        """The difference relative to the recorded value; infinite if that is 0 or not finite."""
        if not self.recorded or not np.isfinite(self.recorded):
            return float("inf")
        return abs(self.again - self.recorded) / abs(self.recorded)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two histories have in common, and where they differ.

    Args:
        steps: Steps that both keep.
        tolerance: Relative difference up to which numbers are equal to rounding.
        bits: Where they first differ at all, or None.
        rounding: Where they first differ by more than the tolerance, or None.
        gaps: The layers that both have, those whose gradients differ most first.
        only_first: Parameter tensors that the second run has not.
        only_second: Those that the first has not.
    """

    steps: int
    tolerance: float
    bits: FirstDifference | None
    rounding: FirstDifference | None
    gaps: tuple[GradientGap, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]


def compare(first: History, second: History, *, tolerance: float | None = None) -> Comparison:
    """Compare two histories at the steps that both keep.

    Args:
        first: A run.
        second: Another.
        tolerance: Relative difference that is rounding; by default what the coarser format of the two allows.
    """
    allowed = rounding(first, second) if tolerance is None else tolerance
    names = (first.param.layers, second.param.layers)
    return Comparison(
        steps=len(np.intersect1d(first.run.kept_steps(), second.run.kept_steps())),
        tolerance=allowed,
        bits=_first_difference(first, second, tolerance=None),
        rounding=_first_difference(first, second, tolerance=allowed),
        gaps=tuple(_gaps(first.param, second.param)),
        only_first=tuple(name for name in names[0] if name not in set(names[1])),
        only_second=tuple(name for name in names[1] if name not in set(names[0])),
    )


def compare_rows(recorded: Mapping[str, Any], again: Mapping[str, Any]) -> tuple[list[ValueDifference], dict[int, int]]:
    """Compare the rows of a rerun with the recorded rows, bit by bit.

    Statistics that only one side has are left out, and so are clocks. Sampled statistics are left out at steps that
    only one side sampled.

    Args:
        recorded: The recorded rows, by table: statistics (S), layers (L), steps (T) and values (T, S, L).
        again: The rows of the rerun.

    Returns:
        The differences, the earliest first and the whole run before its layers; and the number of compared values of
        each step.
    """
    differences: list[ValueDifference] = []
    counts: dict[int, int] = {}
    for name, table in recorded.items():
        other = again[name]
        common = [s for s in table["statistics"] if s in other["statistics"] and s not in catalogue.CLOCK_NAMES]
        columns = [table["statistics"].index(s) for s in common], [other["statistics"].index(s) for s in common]
        steps_T, at_T, again_T = np.intersect1d(table["steps"], other["steps"], return_indices=True)
        was_TSL, is_TSL = table["values"][at_T][:, columns[0]], other["values"][again_T][:, columns[1]]
        sampled_once = np.setxor1d(table["steps"], other["steps"])
        is_later_T = steps_T > sampled_once.min(initial=np.iinfo(np.int64).max)
        is_sampled_S, is_dependent_S = (
            np.array([s in names for s in common], np.bool_) for names in (catalogue.SAMPLED_NAMES, HISTORY_DEPENDENT)
        )
        is_left_out_TSL = np.isnan(was_TSL) & np.isnan(is_TSL)
        is_left_out_TSL |= is_sampled_S[:, None] & (np.isnan(was_TSL) | np.isnan(is_TSL))
        is_left_out_TSL |= is_later_T[:, None, None] & is_dependent_S[:, None]
        for t, step in enumerate(steps_T.tolist()):
            counts[step] = counts.get(step, 0) + int((~is_left_out_TSL[t]).sum())
        for t, s, layer in np.argwhere((was_TSL != is_TSL) & ~is_left_out_TSL).tolist():
            differences.append(
                ValueDifference(
                    step=int(steps_T[t]),
                    statistic=common[s],
                    layer=table["layers"][layer],
                    recorded=float(was_TSL[t, s, layer]),
                    again=float(is_TSL[t, s, layer]),
                )
            )
    return sorted(differences, key=lambda difference: (difference.step, difference.layer != "")), counts


def rounding(first: History, second: History) -> float:
    """Return the relative difference that rounding explains, in the coarser format of two runs."""
    coarser = max(ROUNDOFF.get(history.info.precision, ROUNDOFF["fp32"]) for history in (first, second))
    return max(SUMMED * ROUNDOFF["fp32"], STORED * coarser if coarser > ROUNDOFF["fp32"] else 0.0)


def _first_difference(first: History, second: History, *, tolerance: float | None) -> FirstDifference | None:
    """Return where two histories first differ: bit for bit, or by more than a tolerance."""
    earliest: list[FirstDifference] = []
    for statistic, layers, steps_T, a_TL, b_TL in _common(first, second):
        if tolerance is not None and statistic in CANCELLING:
            continue
        differs_TL = _is_different(a_TL, b_TL, 0.0 if statistic in EXACT else tolerance)
        hits_T = np.flatnonzero(differs_TL.any(axis=1))
        if not hits_T.size:
            continue
        t = int(hits_T[0])
        mine = np.flatnonzero(differs_TL[t])
        i, step = int(mine[0]), int(steps_T[t])
        name = layers[i] or None
        a, b = float(a_TL[t, i]), float(b_TL[t, i])
        earliest.append(
            FirstDifference(step=step, statistic=statistic, layer=name, first=a, second=b, others=len(mine) - 1)
        )
    if not earliest:
        return None
    step = min(p.step for p in earliest)
    here = [p for p in earliest if p.step == step]
    told = min(here, key=lambda p: _rank(p.statistic))
    others = sum(p.others + 1 for p in here) - 1
    return FirstDifference(
        step=step, statistic=told.statistic, layer=told.layer, first=told.first, second=told.second, others=others
    )


def _common(
    first: History, second: History
) -> Iterator[tuple[str, tuple[str, ...], NDArray[np.int64], Floats, Floats]]:
    """Yield each statistic that both record, with its layers, the common steps, and the values of both, (T, L)."""
    for a, b in ((first.run, second.run), (first.param, second.param), (first.act, second.act)):
        layers = tuple(name for name in a.layers if name in set(b.layers))
        for statistic in a.statistics:
            if statistic not in b.statistics or statistic in catalogue.CLOCK_NAMES or not layers:
                continue
            steps_T, a_TL, b_TL = _aligned(a, b, statistic, layers)
            yield statistic, layers, steps_T, a_TL, b_TL


def _aligned(a: Table, b: Table, statistic: str, layers: tuple[str, ...]) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Return the steps that two tables have in common, and a statistic of some layers of both at them."""
    (a_steps, a_TL), (b_steps, b_TL) = a.series(statistic), b.series(statistic)
    steps_T, mine, theirs = np.intersect1d(a_steps, b_steps, assume_unique=True, return_indices=True)
    a_columns, b_columns = ([table.layers.index(name) for name in layers] for table in (a, b))
    return steps_T, a_TL[mine][:, a_columns], b_TL[theirs][:, b_columns]


def _is_different(a_TL: Floats, b_TL: Floats, tolerance: float | None) -> NDArray[np.bool_]:
    """Say where values differ: in their bits where there is no tolerance. Two missing ones are the same."""
    a_TL, b_TL = a_TL.astype(np.float64), b_TL.astype(np.float64)  # exact: it keeps every bit of a float32
    same_TL = (a_TL == b_TL) | (np.isnan(a_TL) & np.isnan(b_TL))
    if tolerance:
        with np.errstate(invalid="ignore"):
            same_TL |= np.abs(a_TL - b_TL) <= tolerance * np.maximum(np.abs(a_TL), np.abs(b_TL))
    is_different_TL: NDArray[np.bool_] = ~same_TL
    return is_different_TL


def _rank(statistic: str) -> int:
    return next((i for i, prefix in enumerate(ORDER) if statistic.startswith(prefix)), len(ORDER))


def _gaps(first: Table, second: Table) -> list[GradientGap]:
    layers = tuple(name for name in first.layers if name in set(second.layers))
    if not layers:
        return []
    _, a_TL, b_TL = _aligned(first, second, "grad.l2", layers)
    with np.errstate(all="ignore"):
        decades_TL: NDArray[Any] = np.log10(b_TL.astype(np.float64)) - np.log10(a_TL.astype(np.float64))
    decades_TL[(a_TL == 0) & (b_TL == 0)] = 0.0
    gaps = []
    for i, layer in enumerate(layers):
        known_T = decades_TL[~np.isnan(decades_TL[:, i]), i]
        if known_T.size:
            gap = GradientGap(layer=layer, decades=float(np.median(known_T)), spread=float(np.median(np.abs(known_T))))
            gaps.append(gap)
    return sorted(gaps, key=lambda gap: -gap.spread)
