"""GW401: gradients add up over updates because nothing clears them."""

# T = steps of a window, L = parameter tensors

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import finding_of
from gradwatch.detect.features.robust_stats import log10
from gradwatch.events import GRADIENTS_CLEARED, GRADIENTS_KEPT, GRADIENTS_KEPT_LATER
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Event, Finding, Quantity

STEPS = 9
"""First steps that are looked at: a sum of nine gradients is at least three times one of them."""


NEGLIGIBLE = 5.0
"""Decades below the largest norm at which a norm is rounding error, as that of a bias that a normalisation cancels."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MissingZeroGrad:
    """Gradients that are never cleared.

    What it measures: two things. (1) What `watch` saw of a parameter at each end of an optimizer between its first
    updates, and between a few in a row now and then: whether any backward found its gradient cleared, or written over
    by a loop that makes `p.grad` itself, of what `torch.autograd.grad` returns. (2) Where that was not seen, the
    gradient norms of the first 9 steps. A sum of t gradients grows as a power of t: t where they agree, the
    root of t where they are noise, and smoothly, because one more batch changes little. Nearly all tensors have to grow
    with such a power, from the first update on, without the noise that batches have. Learning can raise norms too, but
    not in all tensors, not at once, and not slower and slower.

    Why it matters: each update repeats all earlier ones, a momentum of 1 without friction: training overshoots, or
    blows up.

    When it is wrong: gradients kept on purpose across updates. A run that began before it was watched is not judged;
    nor one whose gradients are cleared now and then, before 9 updates.

    What to do: call `optimizer.zero_grad()` once per update, before the first backward or after the step; with
    accumulation, once per group of micro-batches.

    Source: PyTorch tutorial, "Zeroing out gradients in PyTorch",
    https://pytorch.org/tutorials/recipes/recipes/zeroing_out_gradients.html; Jiang et al. 2025 (TrainCheck), OSDI.

    Args:
        every: Steps between two checks. 5: the first is soon after `kept` allows, the second has all nine steps.
        kept: Updates from the second on, all of them, before which nothing was cleared. 3: not once by mistake.
        power: Exponent that nine in ten tensors must reach. 0.35: the root of t, less the noise of nine points.
        at_most: Exponent that none in ten may pass. 1.2: a sum cannot grow faster than t while gradients do not grow.
        first: Growth from step 0 to step 1 that nine in ten tensors must reach. 1.25: the root of 2, less noise.
        noise: Deviation from the power, in decades, that the median tensor may have. 0.1: sums are smooth; in healthy
            runs that grew at once it was 0.13 and more.
    """

    code: ClassVar[str] = "GW401"
    kind: ClassVar[str] = "missing-zero-grad"
    every: int = 5
    kept: int = 3
    power: float = 0.35
    at_most: float = 1.2
    first: float = 1.25
    noise: float = 0.1

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run, or for the end of an optimizer that is not cleared."""
        later = {event.layer: event.text for event in events_of(history, GRADIENTS_KEPT_LATER)}
        for layer, text in ({None: later[None]} if None in later else later).items():
            yield self._finding(history, f"{text} ({layer})" if layer else text, layer=layer, kept=self.kept)
        if history.step >= STEPS - 1 + self.every:
            return
        kept = Counter(event.layer for event in history.events if event.kind == GRADIENTS_KEPT.name)
        never = [layer for layer, count in kept.items() if count >= max(self.kept, history.step - 1)]
        if never:
            layer = None if None in never else never[0]
            what = f"the gradient of {layer}" if layer else "the gradients"
            text = f"nothing clears {what} between updates: each update repeats all before it"
            yield self._finding(history, text, layer=layer, kept=kept[layer])
        elif not any(event.kind == GRADIENTS_CLEARED.name for event in history.events):
            yield from self._summed(history)

    def _summed(self, history: History) -> Iterator[Finding]:
        """Yield a finding where the norms grow like those of a sum."""
        if history.step < STEPS - 1 or history.param.steps()[0] != 0 or not _is_optimized(history):
            return
        log_TL = log10(history.param.window("grad.l2")[:STEPS])
        log_TL = log_TL[:, ~np.isnan(log_TL).any(axis=0)]
        log_TL = log_TL[:, log_TL[-1] > np.fmax.reduce(log_TL[-1], initial=-np.inf) - NEGLIGIBLE]
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
        yield self._finding(
            history,
            "every gradient grows like the sum of all before it: nothing clears them between updates",
            Quantity(key="accumulation.exponent", label="exponent of growth, median", value=float(np.median(power_L))),
            Quantity(
                key="accumulation.first_growth",
                label="growth from step 0 to step 1",
                value=float(10 ** np.median(log_TL[1] - log_TL[0])),
            ),
            Quantity(key="accumulation.deviation_decades", label="deviation from a power", value=noise, unit="decades"),
        )

    def _finding(
        self, history: History, message: str, *evidence: Quantity, layer: str | None = None, kept: int = 0
    ) -> Finding:
        return finding_of(
            self,
            history,
            message,
            *evidence,
            Quantity(
                key="accumulation.uncleared_updates",
                label="updates before which nothing was cleared",
                value=float(kept),
                unit="steps",
            ),
            layer=layer,
        )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("gradients that agree add up", _summed(power=0.9), (None,))
        yield Example("gradients that are noise add up", _summed(power=0.55), (None,))
        yield Example("no backward finds the gradients cleared", _kept(4), (None,))
        yield Example("one end of the model is left out", _kept(4, layer="encoder"), ("encoder",))
        yield Example("they are kept once, for a reason", _kept(1))
        later = Synthetic(steps=40).add_event(
            GRADIENTS_KEPT_LATER, step=20, text="nothing clears the gradients any more"
        )
        yield Example("a loop clears them in its first epoch only", later.history(), (None,))
        yield Example("a healthy run", Synthetic(steps=40).history())
        yield Example("they grow like a sum, and were seen to be cleared", _cleared())
        branch = Synthetic(steps=40, noise=0.03)
        branch.grad_l2_TL[:, ::2] *= 1 + branch.t_T[:, None]
        yield Example("branches that start at zero grow with what opens them", branch.history())
        escape = Synthetic(steps=40, noise=0.03)
        escape.grad_l2_TL *= 1.4 ** escape.t_T[:, None]
        yield Example("a run leaves its plateau: faster and faster", escape.history())
        yield Example("norms that rise and fall by the batch", _summed(power=0.9, noise=0.6))


def _is_optimized(history: History) -> bool:
    """Say whether an optimizer holds anything; one that holds nothing clears nothing, which is another illness."""
    return any(layer.group is not None for layer in history.info.layers)


def _kept(updates: int, *, layer: str | None = None) -> History:
    """Return a run of which so many updates repeat the one before."""
    history = Synthetic(steps=updates + 2).history()
    for update in range(updates):
        history.add_event(Event(kind=GRADIENTS_KEPT.name, step=update + 1, layer=layer))
    return history


def _cleared() -> History:
    """Return a run whose gradients grow as a sum would, though they are cleared."""
    history = _summed(power=0.9)
    history.add_event(Event(kind=GRADIENTS_CLEARED.name, step=1))
    return history


def _summed(*, power: float, noise: float = 0.05) -> History:
    """Return a run whose gradients grow as a power of the number of updates."""
    made = Synthetic(steps=40, noise=noise)
    made.grad_l2_TL *= (1.0 + made.t_T[:, None]) ** power
    return made.history()
