"""Add facts from the autograd graph of the loss to a finding: a formula, the place of a cut, shapes."""

from __future__ import annotations

from collections.abc import Sequence

from gradwatch.events import BROADCAST, CONSTANT_SOFTMAX, CUT, LOG_OF_SOFTMAX, SEQUENCE_AXIS, SINGULAR
from gradwatch.history.store import History
from gradwatch.records import Finding, LayerInfo

KINDS = {
    "non-finite": (SINGULAR, LOG_OF_SOFTMAX),
    "no-gradient": (CONSTANT_SOFTMAX, CUT),
    "loss-plateau": (BROADCAST, SEQUENCE_AXIS),
}
"""Events that add to a kind of finding, the most informative kind first."""

MAX_NOTES = 2
"""Maximum number of notes per finding."""


def graph_notes(history: History, leading: Finding) -> list[str]:
    """Return the notes of the autograd graph on a finding, the newest first."""
    before = [event for event in history.events if event.step <= leading.step]
    kinds = KINDS.get(leading.kind, ())
    events = next((found for kind in kinds if (found := [e for e in before if e.kind == kind.name])), [])
    # a cut explains a finding only if it lies at the layers of the finding
    if events and events[0].kind == CUT.name:
        affected = layers_of(history, leading.layer)
        places = [place for place, layer in enumerate(history.info.layers) if layer in affected]
        events = [e for e in events if any(e.values["first"] <= place <= e.values["last"] for place in places)]
    return [event.text for event in sorted(events, key=lambda event: -event.step)[:MAX_NOTES]]


def layers_of(history: History, name: str | None) -> Sequence[LayerInfo]:
    """Return the parameter tensors of a module or parameter name, or all tensors for None."""
    return [la for la in history.info.layers if name is None or la.name == name or la.name.startswith(f"{name}.")]
