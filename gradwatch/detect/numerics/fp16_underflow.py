"""GW002: half precision flushes gradients to zero, seen by the grid on which the survivors lie."""

# T = steps of a window, L = parameter tensors

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Example
from gradwatch.detect.features.consequences import is_consequence
from gradwatch.detect.features.finding import finding_of
from gradwatch.detect.features.scope import affected_modules
from gradwatch.detect.features.structure import structure_of
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.history.synthetic.edit import with_statistic
from gradwatch.history.table import Floats
from gradwatch.records import Finding, Quantity, Severity

QUANTUM = 2.0**-24
"""Smallest positive float16 (IEEE 754-2019, binary16: emin - 10 = -24). Below it everything is a multiple of it."""


FAINT = 2.0**17
"""Largest gradient element, in units of 2^-24 / loss scale, up to which nothing may be left of those behind it: the
bias of the output sums the gradients of all samples and places, of which a thousand leave each a hundred units."""

ROUNDING = 2e-7
"""Relative error of dividing a float32 gradient by a loss scale: none for powers of two, up to 1.2e-7 otherwise."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fp16Underflow:
    """Gradients that half precision flushes to zero.

    What it measures: float16 has no number between 0 and 2^-24. A gradient tensor that went through it too small has
    many exact zeros, survivors of only a few units of 2^-24 (divided by the loss scale), and a largest element that is
    an exact multiple of that unit. The three together are found in no other tensor, whatever the loop says of its
    precision: a largest element that small is a multiple by chance once in some 50,000 tensors, and it must be one in
    `rows` rows, in a weight matrix. (The gradient of a bias that a normalisation cancels is rounding error, which lies
    on a grid as well.) Where nothing survived, there is no grid: in a run that computes in float16, half of the weight
    matrices or more, whose gradient is exactly zero at each of the newest 5 steps, while no element of the others is
    above 2^17 units, and no activation is silent that would explain it.

    Why it matters: what is flushed is lost; weights behind those zeros stop learning while the loss looks normal.

    When it is wrong: a loss that is tiny late in a noise-free fit may underflow when nothing is left to learn.

    What to do: scale the loss with torch.amp.GradScaler (starting at 65536), or use bfloat16, which has the exponents
    of float32. Where a GradScaler is there already, its scale has fallen too low: look for overflows.

    Source: Micikevicius et al. 2018, "Mixed precision training", sec. 3.2 and fig. 3, https://arxiv.org/abs/1710.03740.

    Args:
        every: Steps between two looks. 5: what is lost meanwhile is little.
        units: Root mean square of the surviving elements, in units of 2^-24 / loss scale, up to which they count as
            underflowing. 32: of normally distributed values with that size 1 % are flushed, of the heavier tails
            of real gradients ten times as many.
        zero_frac: Smallest fraction of zeros, 0..1. 0.1: below it what is lost is within the noise of a batch.
        rows: How many of the newest 5 recorded steps must show it. 3: more than half.
    """

    code: ClassVar[str] = "GW002"
    kind: ClassVar[str] = "fp16-underflow"
    every: int = 5
    units: float = 32.0
    zero_frac: float = 0.1
    rows: int = 3

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each module whose gradients underflow."""
        scale = history.run.newest("loss_scale")[0]
        unit = QUANTUM / scale if scale > 0 else QUANTUM
        absmax_L = history.param.newest("grad.absmax")
        is_small_L = absmax_L < 64 * self.units * unit  # nan is not below anything
        if not is_small_L.any():
            return
        yield from self._nothing_left(history, absmax_L, unit)
        if not _on_grid(absmax_L[is_small_L] / unit).any():
            return
        flushed_TL, zero_TL = self._flushed(history, unit)
        ill_L = np.count_nonzero(flushed_TL, axis=0) >= self.rows
        matrices_M = structure_of(history).matrices.indices_M
        if not ill_L[matrices_M].any():  # the gradient of a bias before a normalisation is rounding error
            return
        ill_L |= (zero_TL & flushed_TL.any(axis=1, keepdims=True)).sum(axis=0) >= self.rows
        for layer, group in affected_modules(history, ill_L, kind=self.kind):
            yield self._finding(history, layer, group, unit)

    def _nothing_left(self, history: History, absmax_L: Floats, unit: float) -> Iterator[Finding]:
        """Yield what has no gradient at all, behind gradients that are next to nothing already."""
        info, matrices_M = history.info, structure_of(history).matrices.indices_M
        if info.precision != "fp16" or history.step < 4 or not len(matrices_M):
            return
        zero_L = (history.param.window("grad.zero_frac", 5) == 1).all(axis=0)
        num_zero, is_faint = np.count_nonzero(zero_L[matrices_M]), np.fmax.reduce(absmax_L) < FAINT * unit
        if not len(matrices_M) <= 2 * num_zero < 2 * len(matrices_M) or not is_faint or _is_silent(history):
            return
        for layer, group in affected_modules(history, zero_L, kind=self.kind):
            yield self._finding(history, layer, group, unit)

    def _flushed(self, history: History, unit: float) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Say of each tensor and recent step whether some of it was flushed, and whether all of it is zero."""
        zero_TL = history.param.window("grad.zero_frac", 5)
        absmax_TL = history.param.window("grad.absmax", 5) / unit
        with np.errstate(invalid="ignore", divide="ignore"):
            survivors_TL = structure_of(history).rms_scale_L * np.sqrt(1 - zero_TL)
            size_TL = history.param.window("grad.l2", 5) / survivors_TL / unit
            flushed_TL = _on_grid(absmax_TL) & (size_TL <= self.units) & (zero_TL >= self.zero_frac)
        return flushed_TL, zero_TL == 1

    def _finding(self, history: History, layer: str | None, group: list[int], unit: float) -> Finding:
        zero_frac = float(np.median(history.param.newest("grad.zero_frac")[group]))
        absmax = float(np.max(history.param.newest("grad.absmax")[group]))
        grave = Severity.CRITICAL if zero_frac >= 0.5 else Severity.WARNING  # most of the gradient is gone
        return finding_of(
            self,
            history,
            f"half precision flushes the gradient of {layer or 'the whole model'} to zero",
            Quantity(key="grad.zero_frac", value=zero_frac, unit="0..1"),
            Quantity(key="grad.absmax", value=absmax),
            Quantity(key="fp16.smallest", label="smallest float16 / loss_scale", value=unit),
            layer=layer,
            severity=Severity.INFO if is_consequence(history, self.kind) else grave,
        )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("two layers underflow", _underflow((3, 4), scale=1.0), ("layers.3.weight", "layers.4.weight"))
        yield Example("a GradScaler's scale has fallen to 1/64", _underflow((5,), scale=2.0**-6), ("layers.5.weight",))
        yield Example("nothing is left behind the output layer", _nothing_left(largest=1e-3), _FRONT)
        yield Example("gradients that are large enough, and a cut before the last layer", _nothing_left(largest=1.0))
        yield Example("a healthy fp16 run with a GradScaler", Synthetic(steps=40, precision="fp16").history())
        yield Example("as small and as sparse, but off the grid of float16", _underflow((3, 4), scale=1.0, grid=False))
        sparse = Synthetic(steps=40).rising_sparsity(2, rate=0.05, onset=0)
        yield Example("many zeros among gradients of ordinary size", sparse.history())


def _is_silent(history: History) -> bool:
    """Say whether an activation passes nothing on, which explains gradients of zero as well."""
    has_samples = history.info.activations and len(history.act.steps(1))
    return bool(has_samples and np.fmax.reduce(history.act.newest("act.dead_frac")) == 1)


_FRONT = tuple(f"layers.{i}.weight" for i in range(11))


def _nothing_left(*, largest: float) -> History:
    """Return a run in half precision in which only the last layer has a gradient, of elements up to a size."""
    made = Synthetic(steps=40, precision="fp16")
    made.info, made.loss_scale_T[:] = replace(made.info, loss_scaling=False), 1.0
    made.grad_l2_TL[:, :11] = 0
    made.zero_frac_TL[:, :11] = 1
    made.grad_l2_TL[:, 11] = largest
    return made.history()


def _on_grid(absmax: NDArray[np.floating[Any]]) -> NDArray[np.bool_]:
    """Say of largest elements, in units of the smallest number, whether they are multiples of it."""
    on_grid: NDArray[np.bool_] = (absmax > 0.5) & (np.abs(absmax - np.rint(absmax)) <= ROUNDING * absmax)
    return on_grid


def _underflow(layers: tuple[int, ...], *, scale: float, grid: bool = True) -> History:
    """Return a run in which the gradients of some layers are a few units of float16's smallest number."""
    made = Synthetic(steps=40, precision="fp16")
    made.loss_scale_T[:] = scale
    unit = QUANTUM / scale
    made.grad_l2_TL[:, layers] = 2.0 * unit * np.sqrt(0.4 * made.numel)
    made.zero_frac_TL[:, layers] = 0.6
    return with_statistic(made.history(), "grad.absmax", (9.0 if grid else 9.37) * unit, layers=layers)
