"""Combine the parameter tensors of each module into a layer, with its gradient, updates and findings."""

# T = recorded steps, L = parameter tensors, M = layers (modules that own parameters)

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.history.store import WINDOW, History, Table
from gradwatch.records import Finding, LayerInfo

Floats = NDArray[np.floating[Any]]


@final
@dataclass(frozen=True, slots=True)
class Layer:
    """One module that owns parameters.

    Args:
        name: Name of the module, or of the parameter if the root module owns it.
        columns: Indexes of its parameter tensors in `history.param`.
        names: Names that a finding may use for the layer: the module and its parameters.
        size: Number of elements in all parameter tensors.
        is_matrix: Whether a trainable tensor has 2 or more dimensions. Norms and biases have 1.
    """

    name: str
    columns: tuple[int, ...]
    names: frozenset[str]
    size: int
    is_matrix: bool


def layers(params: tuple[LayerInfo, ...]) -> tuple[Layer, ...]:
    """Return the layers of a model in the order of the model, input side first."""
    columns: dict[str, list[int]] = {}
    for i, param in enumerate(params):
        columns.setdefault(param.module or param.name, []).append(i)  # the root module has an empty name
    return tuple(_layer(name, mine, params) for name, mine in columns.items())


def matrices(params: tuple[LayerInfo, ...]) -> tuple[Layer, ...]:
    """Return the layers that own a matrix or a filter, through which gradients flow, or all layers if none does."""
    known = layers(params)
    return tuple(layer for layer in known if layer.is_matrix) or known


def grad_norms(l2_TL: Floats, nonfinite_TL: Floats, of: Sequence[Layer]) -> Floats:
    """Return the L2 norm of each layer's gradient, of shape (T, M): nan without a gradient, Inf if it has NaN or Inf.

    Args:
        l2_TL: `grad.l2` over some steps.
        nonfinite_TL: `grad.nonfinite` over the same steps.
        of: Layers to compute.
    """
    # `grad.l2` of a broken gradient may be nan, so only `grad.nonfinite` shows if a gradient was there
    present_TL = ~np.isnan(nonfinite_TL)
    # float64: the square of a large float32 overflows
    squares_TL = np.where(present_TL, np.square(l2_TL, dtype=np.float64), 0.0)
    squares_TL[(present_TL & ~(nonfinite_TL == 0)) | ~np.isfinite(squares_TL)] = np.inf
    total_TM, present_TM = _sums(of, squares_TL, present_TL.astype(np.float64))
    return np.where(present_TM > 0, np.sqrt(total_TM), np.nan)


def norms_now(history: History, of: Sequence[Layer]) -> Floats:
    """Return the gradient norm of each layer at the newest step, of shape (M,)."""
    l2_TL, bad_TL = history.param.newest("grad.l2")[None], history.param.newest("grad.nonfinite")[None]
    norms_TM = grad_norms(l2_TL, bad_TL, of)
    return norms_TM.reshape(len(of))


def norms_over_run(history: History, of: Sequence[Layer]) -> tuple[NDArray[np.int64], Floats]:
    """Return all kept steps, of shape (T,), and the gradient norms of the layers, of shape (T, M)."""
    steps_T, l2_TL = history.param.series("grad.l2")
    return steps_T, grad_norms(l2_TL, history.param.series("grad.nonfinite")[1], of)


def update_ratios(history: History, of: Sequence[Layer]) -> Floats:
    """Return the newest known ratio of update norm to weight norm of each layer, of shape (M,)."""
    ratio_L, weight_L = (newest_known(history.param, s) for s in ("update.ratio", "weight.l2"))
    ratio_M: Floats = ratios(ratio_L[None], weight_L[None], of)[0]
    return ratio_M


def update_ratios_over_run(history: History, of: Sequence[Layer]) -> tuple[NDArray[np.int64], Floats]:
    """Return the kept steps with sampled updates, of shape (T,), and the update/weight ratios, of shape (T, M)."""
    steps_T, ratio_TL = history.param.series("update.ratio")
    sampled_T = ~np.isnan(ratio_TL).all(axis=1)
    weight_TL = history.param.series("weight.l2")[1]
    return steps_T[sampled_T], ratios(ratio_TL[sampled_T], weight_TL[sampled_T], of)


def ratios(ratio_TL: Floats, weight_TL: Floats, of: Sequence[Layer]) -> Floats:
    """Return the update norm divided by the weight norm of each layer, of shape (T, M)."""
    with np.errstate(all="ignore"):  # a layer of zeros has a ratio of Inf or nan
        # norms of tensors add up as squares, ratios do not
        norms = (ratio_TL * weight_TL, weight_TL)
        squares = [np.where(np.isnan(norm_TL), 0.0, np.square(norm_TL, dtype=np.float64)) for norm_TL in norms]
        moved_TM, weight_TM, known_TM = _sums(of, *squares, (~np.isnan(ratio_TL)).astype(np.float64))
        ratio_TM: Floats = np.where(known_TM > 0, np.sqrt(moved_TM / weight_TM), np.nan)
    return ratio_TM


def zero_fracs(zero_TL: Floats, of: Sequence[Layer], params: Sequence[LayerInfo]) -> Floats:
    """Return the zero fraction of each layer's gradient, of shape (T, M): the mean over tensors, weighted by size."""
    # math.prod(()) is 1, but a tensor may be empty
    size_L = np.array([max(1, math.prod(p.shape)) for p in params], np.float64)
    known_TL = ~np.isnan(zero_TL)
    zeros_TM, known_TM = _sums(of, np.where(known_TL, zero_TL * size_L, 0.0), known_TL * size_L)
    with np.errstate(invalid="ignore"):  # 0 / 0 is nan: no tensor of the layer has a gradient
        return zeros_TM / known_TM


def newest_known(table: Table, statistic: str) -> Floats:
    """Return the last known value of each row of a table, of shape (L,); nan if the window has none."""
    for length in (1, 16, WINDOW):  # most statistics are sampled within the newest few steps
        values_TL = table.window(statistic, length)
        known_TL = ~np.isnan(values_TL)
        # the newest step alone is enough only if it has a value in every row
        if known_TL.any() and (length > 1 or known_TL.all()):
            break
    else:
        return np.full(len(table.layers), np.nan)
    row_L = len(values_TL) - 1 - known_TL[::-1].argmax(axis=0)
    newest_L: Floats = values_TL[row_L, np.arange(values_TL.shape[1])]
    return newest_L


def worst_finding(layer: Layer, findings: Iterable[Finding]) -> Finding | None:
    """Return the most severe finding on a layer, the earliest if several are equal.

    A finding is on a layer if it names the layer, one of its parameters, or a module that contains the layer.
    """
    mine = [f for f in findings if any(_covers(name, layer) for name in f.names)]
    return max(mine, key=lambda f: (f.severity, -f.since), default=None)


def _covers(name: str, layer: Layer) -> bool:
    return name in layer.names or layer.name.startswith(f"{name}.")


def median_distances(norms_M: Floats, of: Sequence[Layer]) -> Floats:
    """Return the distance of each layer's gradient from the median layer, in powers of ten, of shape (M,).

    Gradients are compared by root mean square, since layers differ in size. A gradient that is missing, zero or not
    finite has an infinite distance.
    """
    rms_M = norms_M / np.sqrt([layer.size for layer in of])
    usable_M = rms_M[np.isfinite(rms_M) & (rms_M > 0)]
    with np.errstate(all="ignore"):
        distance_M = np.abs(np.log10(rms_M / (np.median(usable_M) if usable_M.size else np.nan)))
    return np.nan_to_num(distance_M, nan=np.inf, posinf=np.inf)


def _layer(name: str, columns: Sequence[int], params: Sequence[LayerInfo]) -> Layer:
    mine = [params[i] for i in columns]
    return Layer(
        name=name,
        columns=tuple(columns),
        names=frozenset((name, *(p.name for p in mine))),
        size=sum(max(1, math.prod(p.shape)) for p in mine),
        is_matrix=any(len(p.shape) > 1 and p.trainable for p in mine),
    )


def _sums(of: Sequence[Layer], *terms_TL: Floats) -> Iterator[Floats]:
    """Yield the sum of each term over the columns of each layer, of shape (T, M)."""
    # gather the columns of each layer side by side: reduceat sums contiguous parts
    columns = np.array([column for layer in of for column in layer.columns], np.intp)
    starts = np.array([0, *itertools.accumulate(len(layer.columns) for layer in of[:-1])], np.intp)
    for term_TL in terms_TL:
        # without layers, the start 0 would lie beyond the columns
        yield np.add.reduceat(term_TL[:, columns], starts, axis=1) if of else np.zeros((len(term_TL), 0))
