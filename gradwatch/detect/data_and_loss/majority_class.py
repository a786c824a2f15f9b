"""Find classifiers that predict nothing but the majority class (GW508)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

from gradwatch.detect import Example, Recovery
from gradwatch.detect.features.events import events_of, majority_event
from gradwatch.detect.features.finding import finding_of
from gradwatch.events import MAJORITY_PREDICTED, MINORITY_PREDICTED
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MajorityClass:
    """A classifier that predicts nothing but the majority class.

    What it measures: the labels of sampled steps, and the most likely class of each sample, position or label.

    Why it matters: the accuracy is the share of the majority class, and no sample of a rare class is found. The loss
    hides it: with 1.6 % of positive pixels it falls from 0.69 to 0.08, which a bias alone can learn.

    Example: `nn.BCEWithLogitsLoss()` for masks in which 4 of 256 pixels are foreground.

    What to do: measure precision and recall instead of the accuracy. If rare classes are ranked well, lower the
    threshold. Otherwise train for longer, weight rare classes more, or draw them more often.

    When it is wrong: never, but such predictions may be right, so this kind is for information. A click is never more
    likely than not. And a model that learns slowly passes this stage: of 25 healthy runs with imbalanced classes, 11
    were in it for more than 250 steps.

    When it is withdrawn: another class is predicted.

    How it is detected: the gradient of the scores reveals the labels. In at least 8 sampled steps in a row, all
    predictions are one class. It has at least four fifths of the labels, and at least 16 labels are of other classes. A
    model that finds a fifth of those would have found one, with a probability of 97 %. Class weights, label smoothing
    and focal terms hide the labels, so such losses are not judged.

    Source: Lin et al. 2017, "Focal loss for dense object detection", sec. 3.3 (initialization with a prior) and 4.1,
    https://arxiv.org/abs/1708.02002; He and Garcia 2009, "Learning from imbalanced data",
    https://doi.org/10.1109/TKDE.2008.239.

    Args:
        every: Steps between two calls. 10: labels and predictions are read that often.
        patience: Steps before the first report. 128: as for `loss-plateau`; most runs have learned more by then.
        planned: Planned steps of the run per step of waiting before the first report. 20: as for `loss-plateau`.
    """

    code: ClassVar[str] = "GW508"
    kind: ClassVar[str] = "majority-class"
    every: int = 10
    patience: int = 128
    planned: int = 20

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding if one class is all that is predicted."""
        event = majority_event(history)
        if event is None or history.step < max(self.patience, (history.info.total_steps or 0) // self.planned):
            return
        share = event.values["share"]
        yield finding_of(
            self,
            history,
            f"only the majority class is predicted: {event.text}, {100 * (1 - share):.2g} % of all",
            Quantity(key="labels.majority", label="labels of the majority class", value=share, unit="0..1"),
            Quantity(key="labels.others", label="labels of other classes that were read", value=event.values["others"]),
            severity=Severity.INFO,
            onset=event.step,
        )

    def recovery(self, history: History, finding: Finding) -> Recovery | None:
        """Return the step at which another class was predicted."""
        event = next((e for e in events_of(history, MINORITY_PREDICTED) if e.step > (finding.onset or 0)), None)
        return None if event is None else Recovery(event.step, "another class is predicted, too")

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("no tag is ever given: for information", _with_event(steps=200).history(), (None,))
        yield Example("the first steps", _with_event(steps=120).history())
        found = _with_event(steps=200).add_event(MINORITY_PREDICTED, step=120)
        yield Example("tags are given later", found.history())
        yield Example("a healthy run", Synthetic(steps=200).history())


def _with_event(*, steps: int) -> Synthetic:
    values = {"class": 0.0, "share": 0.996, "others": 512.0}
    text = "every prediction is class 0; 512 labels that were read are others"
    return Synthetic(steps=steps).add_event(MAJORITY_PREDICTED, step=80, text=text, values=values)
