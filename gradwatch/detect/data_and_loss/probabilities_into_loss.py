"""Find a softmax or another last activation that feeds a loss for scores or log-probabilities (GW502)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

from gradwatch.detect import Example
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import finding_of
from gradwatch.events import (
    BOUNDED_SCORES,
    CONSTANT_SOFTMAX,
    LOG_OF_SOFTMAX,
    PROBABILITIES,
    SCORES,
    SOFTMAX_OVER_BATCH,
    EventKind,
)
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity

WRONG_INPUTS = (PROBABILITIES, BOUNDED_SCORES, SCORES, SOFTMAX_OVER_BATCH)
"""Events of a loss that gets probabilities, bounded or raw scores, or a softmax over samples instead of its input."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProbabilitiesIntoLoss:
    """Probabilities passed to a loss that expects logits, or a similar mix-up.

    What it measures: the operations before the loss, read from its autograd graph at the first steps.

    Why it matters: a softmax of probabilities is nearly uniform: with 10 classes the cross entropy cannot fall below
    1.46. The accuracy still rises, so the bug looks like a hard task.

    Example: `F.cross_entropy(torch.softmax(scores, dim=1), labels)`.

    What to do: remove the last activation from `forward`, and apply a softmax or sigmoid to predictions only. Or
    use NLLLoss with log_softmax, or BCELoss with sigmoid.

    When it is wrong: a custom loss with two softmaxes on purpose. Not seen: compiled graphs, custom autograd functions,
    and a loss passed as a number (unless `watch` gets `loss_fn`).

    How it is detected: the graph shows one of six mistakes. (1) The scores of a cross entropy are the output of a
    softmax or sigmoid. (2) The logits of a binary cross entropy are the output of a sigmoid. (3) A loss written by hand
    takes the softmax or sigmoid of a probability. (4) A negative log-likelihood or a KL divergence gets probabilities
    without a logarithm, or the raw scores of a linear layer. (5) A negative log-likelihood gets a log-softmax over the
    samples of the batch (`dim=0`), not over the classes. (6) The scores of a cross entropy, or the logits of a binary
    one, are the output of a ReLU or a tanh. Only operations that rearrange, clamp or average values may
    lie in between, so the softmax of an attention, a gate or a target does not count.

    Source: PyTorch, CrossEntropyLoss ("unnormalized logits"),
    https://pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html; Lightning-Universe/lightning-bolts#654,
    https://github.com/Lightning-Universe/lightning-bolts/issues/654.

    Args:
        every: Steps between two calls. 5: the graph is read at steps 0, 1 and 8, and says the same each time.
    """

    code: ClassVar[str] = "GW502"
    kind: ClassVar[str] = "probabilities-into-loss"
    every: int = 5

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each place where the graph shows it."""
        for event in (event for kind in WRONG_INPUTS for event in events_of(history, kind)):
            evidence = [Quantity(key="loss", value=float(history.run.newest("loss")[0]))]
            # only probabilities, not scores, give the loss a known floor
            if "floor" in event.values:
                label = "lowest loss it can reach"
                evidence.append(Quantity(key="loss.floor", label=label, value=event.values["floor"]))
            if "classes" in event.values:
                evidence.append(Quantity(key="classes", value=event.values["classes"]))
            message = f"{event.text} (from {event.layer})" if event.layer else event.text
            yield finding_of(self, history, message, *evidence, layer=event.layer, onset=event.step)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        text = "the loss applies a softmax to what is a probability already: it cannot fall below 1.46"
        softmax = _with_event(PROBABILITIES, text, classes=10, floor=1.46)
        yield Example("a softmax before a cross entropy", softmax, ("layers.11",))
        raw = _with_event(SCORES, "the loss expects log-probabilities and gets raw scores")
        yield Example("raw scores into a negative log-likelihood", raw, ("layers.11",))
        cut = _with_event(BOUNDED_SCORES, "the loss gets scores that a ReLU has bounded", classes=10)
        yield Example("a ReLU before a cross entropy", cut, ("layers.11",))
        text = "the softmax goes over the 64 samples of the batch, not over the classes"
        batch = _with_event(SOFTMAX_OVER_BATCH, text, samples=64)
        yield Example("a log-softmax over dimension 0", batch, ("layers.11",))
        yield Example("a healthy run", Synthetic(steps=20).history())
        logarithm = _with_event(LOG_OF_SOFTMAX, "the log of a softmax or sigmoid rounds to log(0)")
        yield Example("the log of a softmax is right, but not stable", logarithm)
        single = _with_event(CONSTANT_SOFTMAX, "a softmax over a single value is 1, whatever the value")
        yield Example("an attention over a single position", single)


def _with_event(kind: EventKind, text: str, **values: float) -> History:
    return Synthetic(steps=20).add_event(kind, layer="layers.11", text=text, values=values).history()
