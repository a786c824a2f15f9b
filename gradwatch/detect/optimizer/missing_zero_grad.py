"""Find gradients that accumulate over updates because no code clears them (GW401)."""

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
from gradwatch.events import GRADIENTS_CLEARED, GRADIENTS_KEPT, GRADIENTS_KEPT_LATER, GRADIENTS_LEFT
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Event, Finding, Quantity

FIRST_STEPS = 9
"""Number of first steps to read: a sum of 9 gradients is at least 3 times as large as one gradient."""

NEGLIGIBLE_DECADES = 5.0
"""Decades below the largest norm at which a norm is rounding error, as for a bias that a normalization cancels."""

MIN_TENSORS = 2
"""Tensors that must have a gradient: a single norm may follow a power law by chance."""

GROWING_FRAC = 0.9
"""Fraction of the tensors, 0..1, that must grow as a sum grows: some layers may wait until another layer opens."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MissingZeroGrad:
    """Gradients that are not cleared before an update.

    What it measures: whether gradients are cleared between updates, and whether those of another loss stay in.

    Why it matters: each update repeats all earlier gradients, like a momentum of 1. Training overshoots or diverges.

    Example: `loss.backward(); optimizer.step()` without `optimizer.zero_grad()`.

    What to do: call `optimizer.zero_grad()` once per update; with gradient accumulation, once per group of
    micro-batches. If another loss leaves gradients, call it right before the backward pass of the own loss.

    When it is wrong: gradients that are kept across updates on purpose. Not judged: a run that began before it was
    monitored, or gradients that are cleared now and then.

    How it is detected: (1) `watch` observes the first and the last parameter of each optimizer, between the first
    updates and between a few successive updates later. No backward pass found their gradient cleared, or replaced by a
    loop that writes `p.grad` itself. (2) Without such observations, the gradient norms of the first 9 steps grow as the
    norms of sums. A sum of t gradients grows as a power of t: with the exponent 1 if they agree, 0.5 if they are noise.
    It grows smoothly, because one more batch changes it little. Nearly all tensors must grow with such a power from the
    first update. Learning can raise norms as well, but not in all tensors, not at once, and not ever more slowly.
    (3) The loss of another optimizer passes through the model to that optimizer's parameters, as the loss of a
    generator passes through a discriminator. `watch` observes the first updates: the gradient that it leaves is still
    there when the own backward pass comes.

    Source: PyTorch tutorial, "Zeroing out gradients in PyTorch",
    https://pytorch.org/tutorials/recipes/recipes/zeroing_out_gradients.html; Jiang et al. 2025 (TrainCheck), OSDI;
    PyTorch DCGAN tutorial, https://pytorch.org/tutorials/beginner/dcgan_faces_tutorial.html, on when to clear the
    gradients of the discriminator.

    Args:
        every: Steps between two checks. 5: the first is soon after `kept` allows, the second has all nine steps.
        kept: Successive updates, from the second, before which no gradient was cleared. 3: more than one mistake.
        left: Updates with gradients that another loss has left. 3: as for `kept`.
        power: Exponent that 90 % of the tensors must reach. 0.35: the root of t, minus the noise of 9 points.
        at_most: Exponent that 90 % of the tensors must not exceed. 1.2: a sum grows no faster than t unless the
            gradients grow.
        first: Growth from step 0 to step 1 that 90 % of the tensors must reach. 1.25: the root of 2, minus noise.
        noise: Deviation of the median tensor from the power, in powers of ten. 0.1: sums are smooth; healthy runs that
            grew at once deviated by 0.13 or more.
    """

    code: ClassVar[str] = "GW401"
    kind: ClassVar[str] = "missing-zero-grad"
    every: int = 5
    kept: int = 3
    left: int = 3
    power: float = 0.35
    at_most: float = 1.2
    first: float = 1.25
    noise: float = 0.1

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run, or for the parameter with a gradient that is not cleared."""
        later = {event.layer: event for event in events_of(history, GRADIENTS_KEPT_LATER)}
        # a finding for the whole run makes findings for single layers redundant
        for layer, event in ({None: later[None]} if None in later else later).items():
            text = f"{event.text} ({layer})" if layer else event.text
            yield self._finding(history, text, layer=layer, kept=self.kept, onset=event.step)
        yield from self._left(history)
        # a loop that never clears shows it in its first steps
        if history.step >= FIRST_STEPS - 1 + self.every:
            return
        kept = Counter(event.layer for event in history.events if event.kind == GRADIENTS_KEPT.name)
        never = [layer for layer, count in kept.items() if count >= max(self.kept, history.step - 1)]
        if never:
            # None stands for all gradients
            layer = None if None in never else never[0]
            gradients = f"the gradient of {layer}" if layer else "the gradients"
            text = f"nothing clears {gradients} between updates: each update repeats all earlier gradients"
            yield self._finding(history, text, layer=layer, kept=kept[layer])
        # an observed clearing outweighs norms that grow as sums do
        elif not any(event.kind == GRADIENTS_CLEARED.name for event in history.events):
            yield from self._summed(history)

    def _left(self, history: History) -> Iterator[Finding]:
        """Yield a finding if updates held gradients that the loss of another optimizer had left."""
        held = list(events_of(history, GRADIENTS_LEFT))
        if len(held) >= self.left:
            yield self._finding(
                history,
                "each update also holds the gradient that the loss of another optimizer leaves on its way through the "
                "model: nothing clears it before the own backward pass",
                kept=len(held),
                onset=held[0].step,
            )

    def _summed(self, history: History) -> Iterator[Finding]:
        """Yield a finding if the gradient norms grow like the norms of sums."""
        # the sums start at step 0, so a resumed run cannot show them
        if history.step < FIRST_STEPS - 1 or history.param.steps()[0] != 0 or not _is_optimized(history):
            return
        log_TL = log10(history.param.window("grad.l2")[:FIRST_STEPS])
        log_TL = log_TL[:, ~np.isnan(log_TL).any(axis=0)]
        log_TL = log_TL[:, log_TL[-1] > np.fmax.reduce(log_TL[-1], initial=-np.inf) - NEGLIGIBLE_DECADES]
        was_skipped = (history.scalar("skipped")[:FIRST_STEPS] == 1).any()
        if len(log_TL) < FIRST_STEPS or log_TL.shape[1] < MIN_TENSORS or was_skipped:
            return
        # a power law is a line in the logarithms: its slope is the exponent
        time_T = np.log10(np.arange(1, FIRST_STEPS + 1))
        time_T -= time_T.mean()
        power_L = time_T @ log_TL / (time_T @ time_T)
        rest_TL = log_TL - log_TL.mean(axis=0) - time_T[:, None] * power_L
        noise = float(np.median(np.sqrt((rest_TL**2).mean(axis=0))))
        # quantiles, because some tensors may deviate
        low, high = np.quantile(power_L, [1 - GROWING_FRAC, GROWING_FRAC])
        first = float(np.quantile(log_TL[1] - log_TL[0], 1 - GROWING_FRAC))
        if not (low >= self.power and high <= self.at_most and 10**first >= self.first and noise <= self.noise):
            return
        yield self._finding(
            history,
            "every gradient grows like the sum of all earlier gradients: nothing clears them between updates",
            Quantity(key="accumulation.exponent", label="median exponent of growth", value=float(np.median(power_L))),
            Quantity(
                key="accumulation.first_growth",
                label="growth from step 0 to step 1",
                value=float(10 ** np.median(log_TL[1] - log_TL[0])),
            ),
            Quantity(
                key="accumulation.deviation_decades",
                label="deviation from a power law",
                value=noise,
                unit="orders of magnitude",
            ),
        )

    def _finding(
        self,
        history: History,
        message: str,
        *evidence: Quantity,
        layer: str | None = None,
        kept: int = 0,
        onset: int | None = None,
    ) -> Finding:
        # a loop that never clears starts to repeat gradients at its first recorded step
        first = int(history.steps("loss")[0])
        return finding_of(
            self,
            history,
            message,
            *evidence,
            Quantity(
                key="accumulation.uncleared_updates",
                label="updates without clearing",
                value=float(kept),
                unit="steps",
            ),
            layer=layer,
            onset=first if onset is None else onset,
        )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("gradients that agree add up", _summed(power=0.9), (None,))
        yield Example("gradients that are noise add up", _summed(power=0.55), (None,))
        yield Example("no backward pass finds the gradients cleared", _kept(4), (None,))
        yield Example("the gradient of one parameter is not cleared", _kept(4, layer="encoder"), ("encoder",))
        yield Example("the gradients are kept once, on purpose", _kept(1))
        yield Example("the loss of a generator leaves gradients in its critic", _left(3), (None,))
        yield Example("it did so once, before the loop began", _left(1))
        later = Synthetic(steps=40).add_event(
            GRADIENTS_KEPT_LATER, step=20, text="nothing clears the gradients any more"
        )
        yield Example("a loop clears the gradients in its first epoch only", later.history(), (None,))
        yield Example("a healthy run", Synthetic(steps=40).history())
        yield Example("the gradients grow as a sum does, but are cleared", _cleared())
        branch = Synthetic(steps=40, noise=0.03)
        branch.grad_l2_TL[:, ::2] *= 1 + branch.t_T[:, None]
        yield Example("half of the layers grow while their branches open", branch.history())
        escape = Synthetic(steps=40, noise=0.03)
        escape.grad_l2_TL *= 1.4 ** escape.t_T[:, None]
        yield Example("the gradients grow ever faster when a run leaves its plateau", escape.history())
        yield Example("the norms rise and fall with the batch", _summed(power=0.9, noise=0.6))


def _is_optimized(history: History) -> bool:
    # an optimizer without parameters clears nothing either; `not-optimized` reports that
    return any(layer.group is not None for layer in history.info.layers)


def _kept(updates: int, *, layer: str | None = None) -> History:
    """Return a run in which `updates` updates repeat the previous gradients."""
    history = Synthetic(steps=updates + 2).history()
    for update in range(updates):
        history.add_event(Event(kind=GRADIENTS_KEPT.name, step=update + 1, layer=layer))
    return history


def _left(updates: int) -> History:
    """Return a run in which `updates` updates held the gradients of another loss."""
    made = Synthetic(steps=12)
    for update in range(updates):
        made.add_event(GRADIENTS_LEFT, step=update + 1)
    return made.history()


def _cleared() -> History:
    """Return a run in which cleared gradients happen to grow like a sum."""
    history = _summed(power=0.9)
    history.add_event(Event(kind=GRADIENTS_CLEARED.name, step=1))
    return history


def _summed(*, power: float, noise: float = 0.05) -> History:
    """Return a run in which gradients grow with a power of the number of updates."""
    made = Synthetic(steps=40, noise=noise)
    made.grad_l2_TL *= (1.0 + made.t_T[:, None]) ** power
    return made.history()
