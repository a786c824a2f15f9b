"""Compare two histories: find the first step at which they differ, and the layers with the largest differences."""

# T = steps in both, S = statistics in both, L = layers in both

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from gradwatch import catalogue
from gradwatch.history.measured import measured
from gradwatch.history.store import Floats, History, Table

CANCELLING_MEANS = ("grad.mean", "act.mean")
"""Means of numbers of both signs, which may cancel down to the rounding error. Only their bits are compared."""
EXACT = ("batch_hash",)
"""Statistics without rounding error. No tolerance applies to them."""
HISTORY_DEPENDENT = ("act.silent", "act.silent_since")
"""Statistics that depend on all earlier samples. They may differ after a step that only one side sampled."""
ORDER = ("batch_hash", "lr.", "weight.l2", "loss", "act.", "grad.", "grad_norm.", "loss_scale", "skipped", "update.")
"""Computation order of the statistics in a step. If several differ at a step, the first is closest to the cause."""
ROUNDOFF = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-9}  # IEEE 754, table 3.5; bfloat16 has 8 bits
Places = tuple[NDArray[Any], ...]
"""Index of some rows and columns of an array, as `numpy.ix_` returns it."""
SUM_ROUNDINGS, STORE_ROUNDINGS = 2.0**10, 2.0**3
"""Rounding errors in a number, in units of the roundoff. The first is for fp32 sums of some 1000 terms in any order.
The second is for values stored in the format of the forward pass in some 10 layers. Such errors grow with the root of
their number (N. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., sec. 2.8), so both are upper
bounds."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """The first step at which two histories differ.

    Args:
        step: Optimizer step.
        statistic: The differing statistic; if there are several, the first that a step computes.
        layer: Parameter tensor or activation module, or None for the run.
        first: Value in the first run.
        second: Value in the second run.
        others: Number of other values of layers and run that differ at this step.
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
    """The difference between the gradient norms of a layer in two runs.

    Args:
        layer: Parameter tensor.
        decades: Median over the common steps of the decimal logarithm of the second norm over the first; infinite if
            one of the norms is zero.
        spread: Median of the absolute value of that logarithm. Noise of changing sign adds to `spread`, not to
            `decades`.
    """

    layer: str
    decades: float
    spread: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """A recorded value that differs in a rerun of its step.

    Args:
        step: Optimizer step.
        statistic: Name in the catalogue.
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
        """Difference relative to the recorded value; infinite if the recorded value is 0 or not finite."""
        if not self.recorded or not np.isfinite(self.recorded):
            return float("inf")
        return abs(self.again - self.recorded) / abs(self.recorded)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The differences of two histories over their common steps and layers.

    Args:
        steps: Number of steps that both histories keep.
        tolerance: Relative difference that counts as rounding error.
        bits: First difference of any size, or None.
        rounding: First difference above the tolerance, or None.
        gaps: Gradient differences of the common layers, the largest first.
        only_first: Parameter tensors that only the first run has.
        only_second: Parameter tensors that only the second run has.
    """

    steps: int
    tolerance: float
    bits: FirstDifference | None
    rounding: FirstDifference | None
    gaps: tuple[GradientGap, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]


class _CommonStatistic(NamedTuple):
    """A statistic of two histories at their common steps and layers, and the values that both have measured."""

    name: str
    layers: tuple[str, ...]
    steps_T: NDArray[np.int64]
    first_TL: Floats
    second_TL: Floats
    is_measured_TL: NDArray[np.bool_]


def compare(first: History, second: History, *, tolerance: float | None = None) -> Comparison:
    """Compare two histories at their common steps.

    Args:
        first: History of the first run.
        second: History of the second run.
        tolerance: Relative difference that counts as rounding error. The default is chosen for the coarser format.
    """
    allowed = choose_tolerance(first, second) if tolerance is None else tolerance
    names = (first.param.layers, second.param.layers)
    return Comparison(
        steps=len(np.intersect1d(first.run.kept_steps(), second.run.kept_steps())),
        tolerance=allowed,
        bits=_first_difference(first, second, tolerance=None),
        rounding=_first_difference(first, second, tolerance=allowed),
        gaps=tuple(_compare_gradients(first.param, second.param)),
        only_first=tuple(name for name in names[0] if name not in set(names[1])),
        only_second=tuple(name for name in names[1] if name not in set(names[0])),
    )


def compare_rows(
    recorded: Mapping[str, Any], again: Mapping[str, Any], *, tolerance: float = 0.0, without: Collection[str] = ()
) -> tuple[list[ValueDifference], dict[int, int]]:
    """Compare the rows of a rerun with the recorded rows, bit by bit or with a tolerance.

    Clocks and statistics that only one side has are skipped. Sampled statistics are skipped at steps that only one side
    sampled. With a tolerance, means that may cancel are skipped.

    Args:
        recorded: The recorded rows, by table: statistics (S), layers (L), steps (T) and values (T, S, L).
        again: The rows of the rerun.
        tolerance: Relative difference to ignore.
        without: Further statistics to skip.

    Returns:
        The differences, ordered by step, with the whole run before its layers; and the number of compared values by
        step.
    """
    differences: list[ValueDifference] = []
    counts: dict[int, int] = {}
    for name, table in recorded.items():
        other = again[name]
        if not other["layers"]:  # the activations of several ranks are not measured again
            continue
        skipped = {*catalogue.CLOCK_NAMES, *without, *(CANCELLING_MEANS if tolerance else ())}
        common = [s for s in table["statistics"] if s in other["statistics"] and s not in skipped]
        columns = [table["statistics"].index(s) for s in common], [other["statistics"].index(s) for s in common]
        steps_T, at_T, again_T = np.intersect1d(table["steps"], other["steps"], return_indices=True)
        was_TSL, is_TSL = table["values"][at_T][:, columns[0]], other["values"][again_T][:, columns[1]]
        sampled_once = np.setxor1d(table["steps"], other["steps"])
        is_later_T = steps_T > sampled_once.min(initial=np.iinfo(np.int64).max)
        is_sampled_S, is_dependent_S = (
            np.array([s in names for s in common], np.bool_) for names in (catalogue.SAMPLED_NAMES, HISTORY_DEPENDENT)
        )
        # nan is unequal to itself, but two missing values count as equal
        is_left_out_TSL = np.isnan(was_TSL) & np.isnan(is_TSL)
        is_left_out_TSL |= is_sampled_S[:, None] & (np.isnan(was_TSL) | np.isnan(is_TSL))
        is_left_out_TSL |= is_later_T[:, None, None] & is_dependent_S[:, None]
        for t, step in enumerate(steps_T.tolist()):
            # summed over the tables
            counts[step] = counts.get(step, 0) + int((~is_left_out_TSL[t]).sum())
        for t, s, layer in np.argwhere(_is_different(was_TSL, is_TSL, tolerance) & ~is_left_out_TSL).tolist():
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


def choose_tolerance(first: History, second: History) -> float:
    """Return the largest relative difference that rounding explains in the coarser format of two runs."""
    return max(rounding_tolerance(history.info.precision) for history in (first, second))


def rounding_tolerance(precision: str) -> float:
    """Return the largest relative difference that rounding explains in a format, such as `bf16`."""
    coarser = ROUNDOFF.get(precision, ROUNDOFF["fp32"])
    return max(SUM_ROUNDINGS * ROUNDOFF["fp32"], STORE_ROUNDINGS * coarser if coarser > ROUNDOFF["fp32"] else 0.0)


def _first_difference(first: History, second: History, *, tolerance: float | None) -> FirstDifference | None:
    """Return the first difference of two histories, of any size or above a tolerance."""
    differences: list[FirstDifference] = []  # the first of each statistic
    for statistic, layers, steps_T, a_TL, b_TL, is_measured_TL in _common_statistics(first, second):
        if tolerance is not None and statistic in CANCELLING_MEANS:
            continue
        is_different_TL = is_measured_TL & _is_different(a_TL, b_TL, 0.0 if statistic in EXACT else tolerance)
        if not is_different_TL.any():
            continue
        t = int(is_different_TL.any(axis=1).argmax())
        i = int(is_different_TL[t].argmax())
        differences.append(
            FirstDifference(
                step=int(steps_T[t]),
                statistic=statistic,
                layer=layers[i] or None,
                first=float(a_TL[t, i]),
                second=float(b_TL[t, i]),
                others=int(is_different_TL[t].sum()) - 1,  # without this one
            )
        )
    if not differences:
        return None
    step = min(d.step for d in differences)
    at_step = sorted((d for d in differences if d.step == step), key=lambda d: _rank(d.statistic))
    return replace(at_step[0], others=sum(d.others + 1 for d in at_step) - 1)


def _common_statistics(first: History, second: History) -> Iterator[_CommonStatistic]:
    for a, b in ((first.run, second.run), (first.param, second.param), (first.act, second.act)):
        layers = tuple(name for name in a.layers if name in set(b.layers))
        steps_T, in_a, in_b = _align(a, b, layers)
        sampled_once = np.setxor1d(a.kept_steps(), b.kept_steps())
        is_later_T = steps_T > sampled_once.min(initial=np.iinfo(np.int64).max)
        for statistic in a.statistics:
            # clocks differ in every run
            if statistic not in b.statistics or statistic in catalogue.CLOCK_NAMES or not layers:
                continue
            is_measured_TL = measured(first, a, statistic)[in_a] & measured(second, b, statistic)[in_b]
            if statistic in HISTORY_DEPENDENT:
                is_measured_TL[is_later_T] = False
            first_TL, second_TL = a.series(statistic)[1][in_a], b.series(statistic)[1][in_b]
            yield _CommonStatistic(statistic, layers, steps_T, first_TL, second_TL, is_measured_TL)


def _align(a: Table, b: Table, layers: Sequence[str]) -> tuple[NDArray[np.int64], Places, Places]:
    """Return the common steps of two tables, and the places (T, L) of these steps and some layers in both tables."""
    steps_T, a_rows, b_rows = np.intersect1d(a.kept_steps(), b.kept_steps(), assume_unique=True, return_indices=True)
    a_columns, b_columns = (np.array([t.layers.index(name) for name in layers], np.intp) for t in (a, b))
    return steps_T, np.ix_(a_rows, a_columns), np.ix_(b_rows, b_columns)


def _is_different(a_TL: Floats, b_TL: Floats, tolerance: float | None) -> NDArray[np.bool_]:
    """Return which values differ, by more than the tolerance if there is one. Two nan are equal."""
    a_TL, b_TL = a_TL.astype(np.float64), b_TL.astype(np.float64)  # exact: it keeps every bit of a float32
    same_TL = (a_TL == b_TL) | (np.isnan(a_TL) & np.isnan(b_TL))
    if tolerance:
        with np.errstate(invalid="ignore"):  # inf - inf
            same_TL |= np.abs(a_TL - b_TL) <= tolerance * np.maximum(np.abs(a_TL), np.abs(b_TL))
    is_different_TL: NDArray[np.bool_] = ~same_TL
    return is_different_TL


def _rank(statistic: str) -> int:
    return next((i for i, prefix in enumerate(ORDER) if statistic.startswith(prefix)), len(ORDER))


def _compare_gradients(first: Table, second: Table) -> list[GradientGap]:
    layers = tuple(name for name in first.layers if name in set(second.layers))
    if not layers:
        return []
    _, in_a, in_b = _align(first, second, layers)
    a_TL, b_TL = first.series("grad.l2")[1][in_a], second.series("grad.l2")[1][in_b]
    with np.errstate(all="ignore"):
        decades_TL: NDArray[Any] = np.log10(b_TL.astype(np.float64)) - np.log10(a_TL.astype(np.float64))
    decades_TL[(a_TL == 0) & (b_TL == 0)] = 0.0  # equal, although the logarithms are infinite
    gaps = []
    for i, layer in enumerate(layers):
        known_T = decades_TL[~np.isnan(decades_TL[:, i]), i]
        if known_T.size:
            gap = GradientGap(layer=layer, decades=float(np.median(known_T)), spread=float(np.median(np.abs(known_T))))
            gaps.append(gap)
    # by spread: a median of both signs may be 0 although every step differs
    return sorted(gaps, key=lambda gap: -gap.spread)
