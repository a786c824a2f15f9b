"""Find weights that start all equal, so that units stay identical, or all zero, so that hardly any gradient arrives."""

# M = weight matrices and kernels

from __future__ import annotations

from collections.abc import Iterator

from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import HasCode, finding_of
from gradwatch.detect.features.structure import structure_of
from gradwatch.events import WEIGHTS_ALIKE
from gradwatch.history.store import History
from gradwatch.records import Finding, Quantity


def find_equal_units(detector: HasCode, history: History) -> Iterator[Finding]:
    """Yield the layers in which all units get the same gradient and so remain copies of each other."""
    for event in events_of(history, WEIGHTS_ALIKE):
        deviation = Quantity(key="weight.std", label="standard deviation of the weights", value=0.0)
        yield finding_of(detector, history, f"{event.text} (in {event.layer})", deviation, layer=event.layer)


def find_zero_weights(detector: HasCode, history: History, *, layers: int) -> Iterator[Finding]:
    """Yield the run if all its matrices, at least `layers`, start at zero: each blocks the gradient of the others."""
    infos, matrices_M = history.info.layers, structure_of(history).matrices.indices_M
    weight_M, grad_M = (history.param.window(name)[0, matrices_M] for name in ("weight.l2", "grad.l2"))
    # the last matrix gets a gradient if biases reach it; frozen tensors may start at zero on purpose
    if len(weight_M) < layers or weight_M.any() or (grad_M > 0).sum() > 1 or not all(info.trainable for info in infos):
        return
    yield finding_of(
        detector,
        history,
        "all weights are initialized to zero: each matrix blocks the gradient of all before it",
        Quantity(key="init.zero_matrices", label="matrices initialized to zero", value=float(len(weight_M))),
    )
