"""Find gradients that half precision flushes to zero, by the grid of the remaining values (GW002)."""

# T = steps of a window, L = parameter tensors

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
from gradwatch.history.synthetic.dynamics import Precision
from gradwatch.history.synthetic.edit import with_statistic
from gradwatch.records import Finding, Quantity, Severity

SMALLEST_FP16 = 2.0**-24
"""Smallest positive float16 (IEEE 754-2019, binary16: emin - 10 = -24). Smaller numbers are multiples of it."""

ROUNDING_ERROR = 2e-7
"""Relative error of a float32 gradient divided by a loss scale: 0 for powers of two, up to 1.2e-7 otherwise."""

WINDOW_STEPS = 5
"""Number of newest steps to read, by default equal to `every`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fp16Underflow:
    """Gradients that underflow to zero in half precision.

    What it measures: exact zeros in gradients whose other elements are only a few multiples of the smallest float16
    number.

    Why it matters: the weights that get these zeros stop learning while the loss looks normal.

    Example: `model.half()` and `loss.backward()` without a GradScaler.

    What to do: scale the loss with torch.amp.GradScaler, starting at 65536, or use bfloat16. If there is a GradScaler,
    its scale is too low: look for overflows.

    When it is wrong: a tiny loss late in a fit without noise may underflow when there is no more to learn.

    How it is detected: float16 has no number between 0 and 2^-24, the unit (divided by the loss scale). A gradient
    tensor has `zero_frac` zeros or more, nonzero elements of at most `units` units, and a largest element that is an
    exact multiple of the unit; in some tensor it is below `peak` times `units`. By chance a largest element that small
    is a multiple in 1 of 50,000 tensors. Numbers of bfloat16 always are from 128 units on, so a gradient of that
    format, by its own dtype or by autocast, is ruled out. All must hold at `rows` steps and in a weight matrix: the
    gradient of a bias that a normalization cancels is rounding error, which lies on a grid as well.

    Source: Micikevicius et al. 2018, "Mixed precision training", sec. 3.2 and fig. 3, https://arxiv.org/abs/1710.03740.

    Args:
        every: Steps between two calls. 5: little is lost in 5 steps.
        units: Root mean square of the nonzero elements, in units of 2^-24 / loss scale, up to which they underflow. 32:
            of normally distributed values of that size 1 % are flushed, and 10 times as many of real gradients, which
            have heavier tails.
        zero_frac: Smallest fraction of zeros, 0..1. 0.1: smaller losses are within the noise of a batch.
        rows: Number of the newest 5 recorded steps at which it must hold. 3: more than half.
        peak: Largest element, in units of the root mean square of the nonzero elements, up to which a gradient may
            underflow. 64: the ratio is 5 for a million values of a normal distribution, and real gradients have heavier
            tails.
        critical: Fraction of zeros, 0..1, at which the finding is critical. 0.5: most of the gradient is lost.
    """

    code: ClassVar[str] = "GW002"
    kind: ClassVar[str] = "fp16-underflow"
    every: int = 5
    units: float = 32.0
    zero_frac: float = 0.1
    rows: int = 3
    peak: float = 64.0
    critical: float = 0.5

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each module with gradients that underflow."""
        scale = history.run.newest("loss_scale")[0]
        # gradients are recorded unscaled, so the float16 grid shrinks by the loss scale
        unit = SMALLEST_FP16 / scale if scale > 0 else SMALLEST_FP16
        absmax_L = history.param.newest("grad.absmax")
        # False for nan
        is_small_L = (absmax_L < self.peak * self.units * unit) & _may_be_fp16(history)
        if not is_small_L.any():
            return
        if not _on_grid(absmax_L[is_small_L] / unit).any():
            return
        flushed_TL, zero_TL = self._flushed(history, unit)
        affected_L = np.count_nonzero(flushed_TL, axis=0) >= self.rows
        matrices_M = structure_of(history).matrices.indices_M
        # a matrix must be affected
        if not affected_L[matrices_M].any():  # the gradient of a bias before a normalization is rounding error
            return
        # tensors that are all zero at the same steps have underflowed entirely
        affected_L |= (zero_TL & flushed_TL.any(axis=1, keepdims=True)).sum(axis=0) >= self.rows
        for layer, group in affected_modules(history, affected_L, kind=self.kind):
            yield self._finding(history, layer, group, unit)

    def _flushed(self, history: History, unit: float) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return whether elements were flushed, and whether all are zero, for each recent step and tensor."""
        zero_TL = history.param.window("grad.zero_frac", WINDOW_STEPS)
        absmax_TL = history.param.window("grad.absmax", WINDOW_STEPS) / unit
        with np.errstate(invalid="ignore", divide="ignore"):
            # the root mean square of the nonzero elements alone
            rms_scale_TL = structure_of(history).rms_scale_L * np.sqrt(1 - zero_TL)
            size_TL = history.param.window("grad.l2", WINDOW_STEPS) / rms_scale_TL / unit
            flushed_TL = _on_grid(absmax_TL) & (size_TL <= self.units) & (zero_TL >= self.zero_frac)
        flushed_TL &= _may_be_fp16(history)
        return flushed_TL, zero_TL == 1

    def _finding(self, history: History, layer: str | None, group: list[int], unit: float) -> Finding:
        zero_frac = float(np.median(history.param.newest("grad.zero_frac")[group]))
        absmax = float(np.max(history.param.newest("grad.absmax")[group]))
        severity = Severity.CRITICAL if zero_frac >= self.critical else Severity.WARNING
        return finding_of(
            self,
            history,
            f"the gradient of {layer or 'the whole model'} underflows to zero in half precision",
            Quantity(key="grad.zero_frac", value=zero_frac, unit="0..1"),
            Quantity(key="grad.absmax", value=absmax),
            Quantity(key="fp16.smallest", label="smallest float16 / loss_scale", value=unit),
            layer=layer,
            severity=Severity.INFO if is_consequence(history, self.kind) else severity,
        )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("two layers underflow", _underflow((3, 4), scale=1.0), ("layers.3.weight", "layers.4.weight"))
        yield Example("a GradScaler's scale has fallen to 1/64", _underflow((5,), scale=2.0**-6), ("layers.5.weight",))
        yield Example("a healthy fp16 run with a GradScaler", Synthetic(steps=40, precision="fp16").history())
        yield Example("as small and sparse, but off the grid of float16", _underflow((3, 4), scale=1.0, grid=False))
        sparse = Synthetic(steps=40).rising_sparsity(2, rate=0.05, onset=0)
        yield Example(
            "as small and on the grid, which is also that of bfloat16", _underflow((3, 4), scale=1.0, precision="bf16")
        )
        yield Example("many zeros among gradients of ordinary size", sparse.history())


def _on_grid(absmax: NDArray[np.floating[Any]]) -> NDArray[np.bool_]:
    distance = np.abs(absmax - np.rint(absmax))
    on_grid: NDArray[np.bool_] = (absmax > 0.5) & (distance <= ROUNDING_ERROR * absmax)
    return on_grid


def _may_be_fp16(history: History) -> NDArray[np.bool_]:
    """Return whether the gradient of each tensor may have been computed in float16."""
    info = history.info
    ruled_out = ("bfloat16",) if info.precision != "bf16" else ("bfloat16", "float32", "float64")
    return np.array([layer.dtype not in ruled_out for layer in info.layers], dtype=np.bool_)


def _underflow(layers: tuple[int, ...], *, scale: float, grid: bool = True, precision: Precision = "fp16") -> History:
    """Return a run in which the gradients of some layers are a few units of the smallest float16."""
    made = Synthetic(steps=40, precision=precision)
    made.loss_scale_T[:] = scale
    unit = SMALLEST_FP16 / scale
    made.grad_l2_TL[:, layers] = 2.0 * unit * np.sqrt(0.4 * made.numel)
    made.zero_frac_TL[:, layers] = 0.6
    return with_statistic(made.history(), "grad.absmax", (9.0 if grid else 9.37) * unit, layers=layers)
