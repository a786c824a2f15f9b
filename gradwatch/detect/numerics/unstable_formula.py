"""Find formulas that overflow, cancel or have an infinite gradient somewhere, while all values are finite (GW003)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

from gradwatch.detect import Example
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import finding_of
from gradwatch.events import LOG_OF_SOFTMAX, SINGULAR, UNSTABLE
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Event, Finding, Quantity, Severity


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class UnstableFormula:
    """A formula that is finite now and may not stay so, although another form of it would.

    What it measures: the operations of the loss, read from its autograd graph at the first steps.

    Why it matters: the formula overflows, rounds to log(0) or divides 0 by 0 as soon as its argument is large enough,
    which often happens after hours. Until then it loses digits. It is reported as info: nothing is wrong yet.

    Example: `torch.log(torch.softmax(scores, dim=1))`, or `x.square().mean() - x.mean() ** 2`.

    What to do: write the form that the message names. `gradwatch.precision` measures the digits that are lost now.

    When it is wrong: the argument is bounded by something that the graph does not show, such as a constant factor.

    How it is detected: the graph shows one of these formulas without a clamp, a shift or an added constant: the
    logarithm of a softmax or sigmoid, or of 1 minus a sigmoid; a log-sum-exp, softmax or softplus written with `exp`;
    a variance as the mean of squares minus the square of the mean; the square root of a sum of squares, of a variance
    or of a mean of squares per row; acos, asin or atanh. Only names and edges are read, at steps 0, 1 and 8, and no
    value. Not seen: compiled graphs, custom autograd functions, and a loss passed as a number.

    Source: Higham 2002, "Accuracy and Stability of Numerical Algorithms", chapter 1; PyTorch, numerical accuracy,
    https://pytorch.org/docs/stable/notes/numerical_accuracy.html.

    Args:
        every: Steps between two calls. 5: the graph is read at steps 0, 1 and 8, and says the same each time.
    """

    code: ClassVar[str] = "GW003"
    kind: ClassVar[str] = "unstable-formula"
    every: int = 5

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each formula, or formulas of one layer, with the layers that it follows."""
        by_layer: dict[str | None, list[Event]] = {}
        for event in (event for kind in (LOG_OF_SOFTMAX, UNSTABLE) for event in events_of(history, kind)):
            by_layer.setdefault(event.layer, []).append(event)
        # a layer has one finding of a kind
        places: dict[str, list[Event]] = {}
        for found in by_layer.values():
            places.setdefault("; ".join(dict.fromkeys(e.text for e in found)), []).extend(found)
        for text, events in places.items():
            layers = tuple(dict.fromkeys(event.layer for event in events if event.layer))
            after = f" (after {layers[0]}{f' and {len(layers) - 1} more' if layers[1:] else ''})" if layers else ""
            yield finding_of(
                self,
                history,
                f"{text}{after}",
                Quantity(key="graph.places", label="places in the graph", value=float(len(events))),
                layer=None,
                layers=layers,
                severity=Severity.INFO,
                onset=events[0].step,
            )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        logarithm = "log(softmax(x)) or log(sigmoid(x)) can round to log(0): use log_softmax or logsigmoid"
        softmax = Synthetic(steps=20).add_event(LOG_OF_SOFTMAX, layer="layers.11", text=logarithm)
        yield Example("the log of a softmax", softmax.history(), ("layers.11",))
        cancelling = "a variance as E[x^2] - E[x]^2, which can become negative by rounding: use x.var(-1, correction=0)"
        variance = Synthetic(steps=20)
        for layer in ("layers.3", "layers.7"):
            variance.add_event(UNSTABLE, layer=layer, text=cancelling)
        yield Example("a variance by hand in two layers", variance.history(), ("layers.3", "layers.7"))
        norm = Synthetic(steps=20).add_event(UNSTABLE, text="the square root of a sum that may be 0")
        yield Example("a norm by hand that follows no layer", norm.history(), (None,))
        yield Example("a healthy run", Synthetic(steps=20).history())
        nan = Synthetic(steps=20).add_event(SINGULAR, layer="layers.11", text="a division by a sum that may be 0")
        yield Example("a division that only a NaN makes suspicious", nan.history())
        late = Synthetic(steps=20).add_event(UNSTABLE, step=30, text=cancelling)
        yield Example("a graph that is read later", late.history())
