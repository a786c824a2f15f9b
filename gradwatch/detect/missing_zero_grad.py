"""GW401: gradients add up over updates because nothing clears them."""

# T = steps of a window, L = parameter tensors

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example
from gradwatch.detect._robust import log10
from gradwatch.history.store import History
from gradwatch.history.synthetic import Synthetic
from gradwatch.records import Finding, Quantity, Severity

STEPS = 9
"""First steps that are looked at: a sum of nine gradients is at least three times one of them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MissingZeroGrad:
    """Gradients that are never cleared.

    What it measures: the gradient norms of the first 9 steps. A sum of t gradients grows as a power of t: t where they
    agree, the root of t where they are noise, and smoothly, because one more batch changes little. Nearly all tensors
    have to grow with such a power, from the first update on, without the noise that batches have. Learning can raise
    norms too, but not in all tensors, not at once, and not slower and slower.

    Why it matters: each update repeats all earlier ones, a momentum of 1 without friction: training overshoots, or
    blows up.

    When it is wrong: gradients kept on purpose across updates. A run that began before it was watched is not judged;
    nor one whose gradients are cleared now and then, before 9 updates.

    What to do: call `optimizer.zero_grad()` once per update, before the first backward or after the step; with
    accumulation, once per group of micro-batches.

    Source: PyTorch tutorial, "Zeroing out gradients in PyTorch",
    https://pytorch.org/tutorials/recipes/recipes/zeroing_out_gradients.html; Jiang et al. 2025 (TrainCheck), OSDI.

    Args:
        every: Steps between two looks. 8: the first look then has all nine steps.
        power: Exponent that nine in ten tensors must reach. 0.35: the root of t, less the noise of nine points.
        at_most: Exponent that none in ten may pass. 1.2: a sum cannot grow faster than t while gradients do not grow.
        first: Growth from step 0 to step 1 that nine in ten tensors must reach. 1.25: the root of 2, less noise.
        noise: Deviation from the power, in decades, that the median tensor may have. 0.1: sums are smooth; in healthy
            runs that grew at once it was 0.13 and more.
    """

    code: ClassVar[str] = "GW401"
    kind: ClassVar[str] = "missing-zero-grad"
    every: int = 8
    power: float = 0.35
    at_most: float = 1.2
    first: float = 1.25
    noise: float = 0.1

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run."""
        if not STEPS - 1 <= history.step < STEPS - 1 + self.every or history.param.steps()[0] != 0:
            return
        log_TL = log10(history.param.window("grad.l2")[:STEPS])
        log_TL = log_TL[:, ~np.isnan(log_TL).any(axis=0)]
        if len(log_TL) < STEPS or log_TL.shape[1] < 2 or (history.scalar("skipped")[:STEPS] == 1).any():
            return
        time_T = np.log10(np.arange(1, STEPS + 1))
        time_T -= time_T.mean()
        power_L = time_T @ log_TL / (time_T @ time_T)
        rest_TL = log_TL - log_TL.mean(axis=0) - time_T[:, None] * power_L
        noise = float(np.median(np.sqrt((rest_TL**2).mean(axis=0))))
        low, high = np.quantile(power_L, [0.1, 0.9])
        first = float(np.quantile(log_TL[1] - log_TL[0], 0.1))
        if not (low >= self.power and high <= self.at_most and 10**first >= self.first and noise <= self.noise):
            return
        yield Finding(
            code=self.code,
            kind=self.kind,
            layer=None,
            step=history.step,
            severity=Severity.WARNING,
            message="every gradient grows like the sum of all before it: nothing clears them between updates",
            evidence=(
                Quantity(name="exponent of growth, median", value=float(np.median(power_L))),
                Quantity(name="growth from step 0 to step 1", value=float(10 ** np.median(log_TL[1] - log_TL[0]))),
                Quantity(name="deviation from a power", value=noise, unit="decades"),
            ),
        )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("gradients that agree add up", _summed(power=0.9), (None,))
        yield Example("gradients that are noise add up", _summed(power=0.55), (None,))
        yield Example("a healthy run", Synthetic(steps=40).history())
        branch = Synthetic(steps=40, noise=0.03)
        branch.grad_l2_TL[:, ::2] *= 1 + branch.t_T[:, None]
        yield Example("branches that start at zero grow with what opens them", branch.history())
        escape = Synthetic(steps=40, noise=0.03)
        escape.grad_l2_TL *= 1.4 ** escape.t_T[:, None]
        yield Example("a run leaves its plateau: faster and faster", escape.history())
        yield Example("norms that rise and fall by the batch", _summed(power=0.9, noise=0.6))


def _summed(*, power: float, noise: float = 0.05) -> History:
    """Return a run whose gradients grow as a power of the number of updates."""
    made = Synthetic(steps=40, noise=noise)
    made.grad_l2_TL *= (1.0 + made.t_T[:, None]) ** power
    return made.history()
