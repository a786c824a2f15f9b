"""Find sequence models that see the tokens they must predict (GW507)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

from gradwatch.detect import Example
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import finding_of
from gradwatch.events import SEQUENCE_AXIS, TARGETS_AHEAD, TARGETS_COPIED, TARGETS_VISIBLE, EventKind
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLeakage:
    """A sequence model that sees the tokens it must predict.

    What it measures: how many positions the labels are ahead of the input tokens, and which keys the attention of a
    position uses.

    Why it matters: the model learns to copy the next token, so that the loss falls towards 0, also in validation. When
    the model generates text, there is no next token, and it has learned nothing else.

    Example: `nn.TransformerEncoder` without a causal mask, trained on `labels = tokens[:, 1:]`.

    What to do: pass a causal mask, or `is_causal=True`. Use recurrent layers in one direction. Shift the input of a
    decoder by one position, and hide the tokens that an encoder must fill in.

    When it is wrong: a bidirectional recurrent layer that reads the parts of each token, and has inputs as wide as the
    embedding of the tokens. An autoencoder whose code has a place for each token, or that gets a second sequence.

    Not seen: tokens that the model gets as one-hot vectors, convolutions that look ahead, models on a GPU, and compiled
    models.

    How it is detected: at the first sampled steps, the graph of the outputs shows the tokens of each embedding, and the
    graph of the loss or its gradient shows the labels. At least 98 % of 64 or more labels are the token at the next
    position, and at no other distance. The operands of an attention depend on these tokens, and at nine of ten
    positions it uses the key of the next one, or a bidirectional recurrent layer reads the embedding. Or all labels are
    the tokens in their own places, and either operations on single positions lead from there to the scores, or the
    model gets other tokens as well, as a decoder does.

    Source: Vaswani et al. 2017, sec. 3.2.3 (masking of illegal connections), https://arxiv.org/abs/1706.03762;
    Kaufman et al. 2012 (leakage), https://doi.org/10.1145/2382577.2382579.

    Args:
        every: Steps between two calls. 5: tokens and labels are read at the first sampled steps only.
    """

    code: ClassVar[str] = "GW507"
    kind: ClassVar[str] = "target-leakage"
    every: int = 5

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding if a layer sees the labels."""
        for kind in (TARGETS_VISIBLE, TARGETS_COPIED):
            for event in events_of(history, kind):
                message = f"the model sees what it must predict: {event.text}"
                labels = Quantity(key="labels", label="labels that are input tokens", value=event.values["labels"])
                yield finding_of(self, history, message, labels, layer=event.layer, onset=event.step)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        visible = _with_event(
            TARGETS_VISIBLE, "each label is the next input token, and every position sees it", labels=512
        )
        yield Example("an attention without a causal mask", visible, ("layers.3",))
        copied = _with_event(TARGETS_COPIED, "each label is the input token in its own place", labels=512)
        yield Example("a decoder gets its labels", copied, ("layers.3",))
        yield Example("a healthy run", Synthetic(steps=20).history())
        ahead = _with_event(TARGETS_AHEAD, "each label is the input token 2 positions later", ahead=2)
        yield Example("labels that are shifted twice", ahead)
        along = _with_event(SEQUENCE_AXIS, "it mixes the samples of a batch")
        yield Example("an attention that runs along the batch", along)


def _with_event(kind: EventKind, text: str, **values: float) -> History:
    return Synthetic(steps=20).add_event(kind, layer="layers.3", text=text, values=values).history()
