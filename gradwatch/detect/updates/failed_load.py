"""Find loads of a state that change nothing: its names do not match, or its tensors are the model's own (GW304)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

from gradwatch.detect import Example
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import finding_of
from gradwatch.events import OWN_STATE_LOADED, WEIGHTS_ALIKE, WEIGHTS_NOT_LOADED, WEIGHTS_TRAINED
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity

UNMATCHED, TAKEN = "load.unmatched", "load.taken_step"
"""Keys of the number of tensors that a load found no parameter for, and of the step of a state that was not copied."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FailedLoad:
    """A state was loaded, and the weights are what they were before.

    What it measures: calls of `load_state_dict` that matched no parameter, or that got the model's own tensors.

    Why it matters: a model trains from random weights instead of pretrained ones, or the best weights of a training are
    replaced by its last. Torch reports neither.

    Example: `best = model.state_dict()` at the best validation, and `model.load_state_dict(best)` after the training.
    `best` has the tensors of the model, which have been trained since.

    What to do: copy a state that is to be kept with `copy.deepcopy`, or save it to a file. Load with `strict=True`, so
    that names which do not match are an error.

    When it is wrong: a load that is expected to match nothing.

    How it is detected: (1) Under `gradwatch run`: `load_state_dict(strict=False)` matched no parameter, and nothing had
    written to them by the first step. (2) A state of an earlier step is loaded, and the memory of each of its
    parameters is that of the model. Shards and other subclasses of tensors are not compared, and neither are states
    whose names were changed, or that a wrapper such as DistributedDataParallel loads.

    Source: PyTorch, Saving and Loading Models ("best_model_state"),
    https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html.

    Args:
        every: Steps between two calls. 10: both are facts, and most states are loaded at the end.
    """

    code: ClassVar[str] = "GW304"
    kind: ClassVar[str] = "failed-load"
    runs_at_end: ClassVar[bool] = True
    every: int = 10

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each model or part that kept its weights although a state was loaded."""
        for event in events_of(history, WEIGHTS_NOT_LOADED):
            unmatched = Quantity(
                key=UNMATCHED, label="loaded tensors without a parameter", value=event.values["tensors"]
            )
            yield finding_of(self, history, event.text, unmatched, layer=event.layer, onset=event.step)
        for event in events_of(history, OWN_STATE_LOADED):
            taken = Quantity(key=TAKEN, label="step of the loaded state", value=event.values["since"])
            yield finding_of(self, history, event.text, taken, layer=event.layer, onset=event.step)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, and that stay quiet."""
        unloaded = Synthetic(steps=20)
        unloaded.add_event(WEIGHTS_NOT_LOADED, layer="layers", values={"tensors": 62.0}, text="other names")
        yield Example("a load that matched no name", unloaded.history(), ("layers",))
        text = OWN_STATE_LOADED.text.format(since=12)
        own = Synthetic(steps=40).add_event(OWN_STATE_LOADED, step=39, values={"since": 12.0}, text=text)
        yield Example("the best weights were not copied", own.history(), (None,))
        yield Example("a healthy run", Synthetic(steps=40).history())
        alike = Synthetic(steps=20).add_event(WEIGHTS_ALIKE, layer="layers.3", text="all weights are equal")
        yield Example("an event of initial weights", alike.history())
        text = WEIGHTS_TRAINED.text.format(changes=300)
        trained = Synthetic(steps=20).add_event(WEIGHTS_TRAINED, values={"changes": 300.0}, text=text)
        yield Example("a model that was trained before", trained.history())
