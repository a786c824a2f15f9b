"""Find weights and embeddings that were initialized too large."""

# L = parameter tensors

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from gradwatch.detect.activations.poor_initialization_rules.first_loss import loss_by_chance
from gradwatch.detect.activations.poor_initialization_rules.gains import (
    RECURRENT_PREFIXES,
    embedding_gains,
    weight_gains,
)
from gradwatch.detect.features.finding import HasCode, finding_of
from gradwatch.detect.features.scope import affected_modules, module_of
from gradwatch.detect.features.structure import structure_of
from gradwatch.history.store import History
from gradwatch.records import Finding, LayerInfo, Quantity, Severity


def find_large_weights(
    detector: HasCode, history: History, *, gain: float, layers: int, surprise: float
) -> Iterator[Finding]:
    """Yield the modules with weights of at least this gain.

    Args:
        detector: Detector of the findings.
        history: History at step 0 or shortly after.
        gain: Gain at which a layer counts as too large.
        layers: Number of such layers that makes a warning.
        surprise: First loss, in units of the chance loss, that makes a warning of a single layer.
    """
    infos = history.info.layers
    embedding_L = embedding_gains(history)
    gain_L = np.fmax(weight_gains(history), embedding_L)
    large = np.flatnonzero(gain_L >= gain)  # False for nan
    if not len(large):
        return
    units = loss_by_chance(history)
    # a recurrent weight multiplies at each step, so it acts as many layers
    is_alone = len(large) < layers and not any(_is_recurrent(infos[i]) for i in large)
    is_harmful = not is_alone or bool((embedding_L >= gain).any()) or units >= surprise
    # not the first matrix: its input is data, which a large gain may suit, as in random features
    later_M = structure_of(history).matrices.indices_M[1:]
    is_harmful |= math.isnan(units) and bool((gain_L[later_M] >= gain**layers).any())  # one is worth several in a row
    modules = {infos[i].module for i in large}
    # the biases of these modules join, so that a group can cover a whole module
    affected_L = np.array([info.module in modules for info in infos]) & ~(gain_L < gain)
    tables = [(infos[i].name, [int(i)]) for i in np.flatnonzero(embedding_L >= gain)]
    affected_L &= np.isnan(embedding_L)  # an embedding is named as such even if the model has nothing else
    for layer, group in (*tables, *affected_modules(history, affected_L, kind=detector.kind)):
        largest = float(np.fmax.reduce(gain_L[group]))
        most = module_of(history, group[int(np.nanargmax(gain_L[group]))])
        whole = "" if layer else f"all layers are initialized too large, {most} most of all: "
        yield finding_of(
            detector,
            history,
            f"{whole}{layer or most} was initialized with a gain of {largest:.1f} (1 to 1.4 preserves the signal)",
            Quantity(key="gain", value=largest),
            Quantity(key="init.large_layers", label="layers initialized too large", value=float(len(large))),
            Quantity(key="loss.step_0", label="loss at step 0", value=float(history.scalar("loss")[0])),
            layer=layer or most,
            severity=Severity.WARNING if is_harmful else Severity.INFO,
        )


def _is_recurrent(info: LayerInfo) -> bool:
    return info.module_type.startswith(RECURRENT_PREFIXES) and "weight_hh" in info.name
