"""Find a first loss that is far above chance level, or above the targets, because the outputs are badly scaled."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from gradwatch.detect.features.baseline import chance_losses
from gradwatch.detect.features.consequences import severity_after
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import HasCode, finding_of, format_factor
from gradwatch.detect.features.scope import module_of
from gradwatch.events import CHANCE, FIRST_OUTPUTS
from gradwatch.history.store import History
from gradwatch.records import Finding, Quantity, Severity

FLOAT32_NATS = 103.3
"""Loss in nats above which the right class has probability 0 in float32: the smallest number is 1.4e-45."""


def loss_by_chance(history: History) -> float:
    """Return the loss of step 0 in units of the chance loss of a cross entropy, or nan for other losses."""
    return float(history.scalar("loss")[0]) / next(chance_losses(history), math.nan)


def find_high_first_loss(
    detector: HasCode, history: History, *, surprise: float, dominance: float
) -> Iterator[Finding]:
    """Yield the run if its first loss is at least `surprise` chance losses and no layer is a known cause.

    A layer is named if the loss depends `dominance` times as much on its scale as on that of any other layer.
    """
    units = loss_by_chance(history)
    # `not`: nan, for a loss other than a cross entropy, is left out too
    if not surprise <= units < math.inf or any(f.kind == detector.kind for f in history.findings):
        return
    # `units` is not nan, so there is an event
    (event, *_) = events_of(history, CHANCE)
    layer = _dominant_module(history, dominance)
    reason = f"the scale of {layer} is" if layer else "weights or inputs are"
    loss, classes = float(history.scalar("loss")[0]), event.values["classes"]
    log_classes = math.log(classes)
    is_impossible = units * log_classes > FLOAT32_NATS
    yield finding_of(
        detector,
        history,
        f"the initial loss is {format_factor(loss)}; random guessing gives {loss / units:.3g} (ln {classes:.0f}): "
        f"{reason} too large",
        Quantity(key="loss.step_0", label="loss at step 0", value=loss),
        Quantity(key="loss.log_classes", label="ln(number of classes)", value=log_classes),
        layer=layer,
        # a lower loss comes down by itself, so it is for information
        severity=severity_after(history, detector.kind) if is_impossible else Severity.INFO,
    )


def find_large_outputs(detector: HasCode, history: History, *, excess: float, size: float) -> Iterator[Finding]:
    """Yield the run if its first outputs are far larger than their targets, and no layer is a known cause.

    Args:
        detector: Detector of the finding.
        history: History of the run.
        excess: Root mean square of the outputs, in units of that of the targets.
        size: Minimum root mean square of the outputs: targets may be small numbers.
    """
    if any(f.kind == detector.kind and f.severity > Severity.INFO for f in history.findings):
        return
    for event in events_of(history, FIRST_OUTPUTS):
        outputs, targets = event.values["outputs"], event.values["targets"]
        if size <= outputs < math.inf and outputs >= excess * targets:
            yield finding_of(
                detector,
                history,
                f"the first outputs are {format_factor(outputs / targets)} times as large as their targets: weights or "
                "inputs are too large",
                Quantity(key="outputs.size", label="root mean square of the first outputs", value=outputs),
                Quantity(key="targets.size", label="root mean square of their targets", value=targets),
                severity=severity_after(history, detector.kind),
            )


def _dominant_module(history: History, dominance: float) -> str | None:
    """Return the module that moves the first loss more by its scale than any other module, or None.

    The norm of a weight times the norm of its gradient bounds the change of the loss if the weight grows by a factor of
    e. Layers in a row that only multiply have similar products. A layer before an exponential has a far larger product.
    """
    infos = history.info.layers
    size_L = history.param.window("weight.l2")[0] * history.param.window("grad.l2")[0]
    by_module: dict[str, float] = {}
    for info, size in zip(infos, np.nan_to_num(size_L).tolist(), strict=True):
        by_module[info.module] = max(by_module.get(info.module, 0.0), size)
    # two zeros, so that a model of one module unpacks as well
    *_, second, largest = sorted([0.0, 0.0, *by_module.values()])
    return module_of(history, int(np.nanargmax(size_L))) if second > 0 and largest >= dominance * second else None
