"""GW502: a softmax or sigmoid feeds a loss that expects scores or log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

from gradwatch.detect import Example
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import finding_of
from gradwatch.events import CONSTANT_SOFTMAX, LOG_OF_SOFTMAX, PROBABILITIES, SCORES, SOFTMAX_OVER_BATCH
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Event, Finding, Quantity

KINDS = (PROBABILITIES, SCORES, SOFTMAX_OVER_BATCH)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProbabilitiesIntoLoss:
    """The loss is given something other than it expects: probabilities, mostly.

    What it measures: nothing. It reads the autograd graph of the loss at the first steps: cross entropy whose
    scores come out of a softmax or sigmoid; a binary cross entropy with logits that get a sigmoid; a softmax or
    sigmoid of what is one already, as losses by hand have it; a negative
    log-likelihood or a KL divergence of probabilities without a logarithm, or of the raw scores of a linear layer; a
    negative log-likelihood of a log-softmax that goes over the samples of the batch (`dim=0`), not over the classes.
    Only operations that move values about, clamp or average them may lie between, so that the softmax of an
    attention, a gate or a target is none of it.

    Why it matters: a softmax over C probabilities gives the right class at most e / (e + C - 1): with 10 classes the
    cross entropy cannot fall below 1.46, and its gradient is squeezed twice. The accuracy still rises, so that it is
    taken for a hard task. A likelihood without its logarithm rewards confidence hardly at all, one of raw scores
    falls without end.

    When it is wrong: a loss of one's own that squeezes twice on purpose. What a compiled graph or an autograd function
    of one's own does is not seen, nor the graph of a loss that the loop hands over as a plain number, unless
    `watch(loss_fn=...)` is given the module.

    What to do: take the softmax or sigmoid out of the model's forward pass, and apply it where predictions are read;
    or use NLLLoss on log_softmax, BCELoss on the sigmoid.

    Source: PyTorch, CrossEntropyLoss ("unnormalized logits"),
    https://pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html; Lightning-Universe/lightning-bolts#654,
    https://github.com/Lightning-Universe/lightning-bolts/issues/654.

    Args:
        every: Steps between two looks. 5: the graph is read at steps 0, 1 and 8, and says the same at each.
    """

    code: ClassVar[str] = "GW502"
    kind: ClassVar[str] = "probabilities-into-loss"
    every: int = 5

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each place where the graph shows it."""
        for kind in KINDS:
            for event in events_of(history, kind):
                yield self._finding(history, event)

    def _finding(self, history: History, event: Event) -> Finding:
        loss = float(history.scalar("loss", 1)[0])
        evidence = [Quantity(key="loss", value=loss)]
        if "floor" in event.values:
            evidence.append(
                Quantity(key="loss.floor", label="lowest loss that it can reach", value=event.values["floor"])
            )
        if "classes" in event.values:
            evidence.append(Quantity(key="classes", value=event.values["classes"]))
        return finding_of(
            self,
            history,
            f"{event.text} (from {event.layer})" if event.layer else event.text,
            *tuple(evidence),
            layer=event.layer,
        )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        text = "the loss applies a softmax to what is a probability already: it cannot fall below 1.46"
        layer = "layers.11"
        softmax = Synthetic(steps=20).note(PROBABILITIES, layer=layer, text=text, values={"classes": 10, "floor": 1.46})
        yield Example("a softmax before a cross entropy", softmax.history(), (layer,))
        text = "the loss expects log-probabilities and gets raw scores"
        raw = Synthetic(steps=20).note(SCORES, step=1, layer=layer, text=text)
        yield Example("raw scores into a negative log-likelihood", raw.history(), (layer,))
        text = "the softmax goes over the 64 samples of the batch, not over the classes"
        batch = Synthetic(steps=20).note(SOFTMAX_OVER_BATCH, layer=layer, text=text, values={"samples": 64.0})
        yield Example("a log-softmax over dimension 0", batch.history(), (layer,))
        yield Example("a healthy run", Synthetic(steps=20).history())
        text = "the log of a softmax or sigmoid rounds to log(0)"
        logarithm = Synthetic(steps=20).note(LOG_OF_SOFTMAX, layer=layer, text=text)
        yield Example("the log of a softmax is right, if not stable", logarithm.history())
        text = "a softmax over a single value is 1, whatever the value"
        single = Synthetic(steps=20).note(CONSTANT_SOFTMAX, layer="layers.3", text=text)
        yield Example("an attention over a single position", single.history())
