"""Find gradients that accumulate over updates because no code clears them (GW401)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

from gradwatch.detect import Example
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import finding_of
from gradwatch.events import GRADIENTS_KEPT, GRADIENTS_KEPT_LATER, GRADIENTS_LEFT, GRADIENTS_REUSED
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Event, Finding, Quantity

FIRST_STEPS = 9
"""First steps, in which a loop that never clears shows it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MissingZeroGrad:
    """Gradients that are not cleared before an update.

    What it measures: whether gradients are cleared between updates, whether those of another loss stay in, and whether
    each update has a backward pass of its own.

    Why it matters: each update repeats all earlier gradients, like a momentum of 1. Training overshoots or diverges.

    Example: `loss.backward(); optimizer.step()` without `optimizer.zero_grad()`.

    What to do: call `optimizer.zero_grad()` once per update; with gradient accumulation, once per group of
    micro-batches. Call `optimizer.step()` once after them. If another loss leaves gradients, clear them right before
    the backward pass of the optimizer's own loss.

    When it is wrong: gradients that are kept across updates on purpose. Not judged: a run that began before it was
    monitored, or gradients that are cleared now and then.

    How it is detected: (1) `watch` observes the first and the last parameter of each optimizer, between the first
    updates and between a few successive updates later. No backward pass found their gradient cleared, or replaced by a
    loop that writes `p.grad` itself. (2) The loss of another optimizer passes through the model to that optimizer's
    parameters, as the loss of a generator passes through a discriminator. `watch` observes the first updates: the
    gradient that it leaves is still there when the optimizer's own backward pass comes. (3) At least `reused` of the
    first 16 updates used the gradient of the update before: no backward pass came between them, and nothing wrote to
    the gradient.

    Source: PyTorch tutorial, "Zeroing out gradients in PyTorch",
    https://pytorch.org/tutorials/recipes/recipes/zeroing_out_gradients.html; Jiang et al. 2025 (TrainCheck), OSDI;
    PyTorch DCGAN tutorial, https://pytorch.org/tutorials/beginner/dcgan_faces_tutorial.html, on when to clear the
    gradients of the discriminator.

    Args:
        every: Steps between two checks. 5: the first is soon after `kept` allows.
        kept: Successive updates, from the second, before which no gradient was cleared. 3: more than one mistake.
        left: Updates with gradients that another loss has left. 3: as for `kept`.
        reused: Updates without a backward pass of their own. 6: of two updates for each pass, every second one is.
    """

    code: ClassVar[str] = "GW401"
    kind: ClassVar[str] = "missing-zero-grad"
    every: int = 5
    kept: int = 3
    left: int = 3
    reused: int = 6

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run, or for the parameter with a gradient that is not cleared."""
        later = {event.layer: event for event in events_of(history, GRADIENTS_KEPT_LATER)}
        # a finding for the whole run makes findings for single layers redundant
        for layer, event in ({None: later[None]} if None in later else later).items():
            text = f"{event.text} ({layer})" if layer else event.text
            yield self._finding(history, text, layer=layer, kept=self.kept, onset=event.step)
        yield from self._left(history)
        yield from self._reused(history)
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

    def _left(self, history: History) -> Iterator[Finding]:
        """Yield a finding if updates held gradients that the loss of another optimizer had left."""
        held = list(events_of(history, GRADIENTS_LEFT))
        if len(held) >= self.left:
            yield self._finding(
                history,
                "each update also uses the gradient that another optimizer's loss leaves in the model: nothing clears "
                "it before the optimizer's own backward pass",
                kept=len(held),
                onset=held[0].step,
            )

    def _reused(self, history: History) -> Iterator[Finding]:
        """Yield a finding if updates used the gradient of the update before."""
        for event in events_of(history, GRADIENTS_REUSED):
            if event.values["reused"] >= self.reused:
                message = f"gradients are used more than once: {event.text}"
                yield self._finding(history, message, kept=int(event.values["reused"]))

    def _finding(
        self,
        history: History,
        message: str,
        *,
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
        yield Example("no backward pass finds the gradients cleared", _kept(4), (None,))
        yield Example("the gradient of one parameter is not cleared", _kept(4, layer="encoder"), ("encoder",))
        yield Example("the gradients are kept once, on purpose", _kept(1))
        yield Example("the loss of a generator leaves gradients in its critic", _left(3), (None,))
        yield Example("the loss of a generator did so once, before the loop began", _left(1))
        later = Synthetic(steps=40).add_event(
            GRADIENTS_KEPT_LATER, step=20, text="nothing clears the gradients anymore"
        )
        yield Example("a loop clears the gradients in its first epoch only", later.history(), (None,))
        yield Example("each gradient is used by two updates", _reused(8), (None,))
        yield Example("a gradient is used again once", _reused(1))
        yield Example("a healthy run", Synthetic(steps=40).history())


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


def _reused(updates: int) -> History:
    """Return a run in which some of the first updates used the gradient of the update before."""
    values = {"reused": float(updates), "updates": 16.0}
    return Synthetic(steps=40).add_event(GRADIENTS_REUSED, step=20, text="used again", values=values).history()
