"""Compute the gain of each weight at step 0: the factor by which it multiplies its input signal."""

# L = parameter tensors

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.structure import is_normalized
from gradwatch.events import EMBEDDING_PRODUCT, MATRIX, TIED_EMBEDDING, WEIGHTS_OFFSET
from gradwatch.history.store import History
from gradwatch.records import LayerInfo

RECURRENT_PREFIXES = ("GRU", "LSTM", "RNN")
"""Prefixes of recurrent module types: `GRU` matches `GRUCell` too."""


def weight_gains(history: History) -> NDArray[np.float64]:
    """Return the gain of each weight at step 0, of shape (L,), or nan for a tensor without a gain.

    The gain is the root mean square of the elements times the root of the fan-in. A nonzero mean adds up the part that
    all inputs have in common: then the gain is at least the mean times the fan-in.
    """
    infos, l2_L = history.info.layers, history.param.window("weight.l2")[0]
    inputs_L = np.array([_fan_in(info) if _multiplies(infos, i) else math.nan for i, info in enumerate(infos)])
    # modules of the user's own: the graph shows the inputs that the module type cannot tell
    for event in events_of(history, MATRIX):
        weight = int(event.values["weight"])
        inputs_L[weight] = math.nan if is_normalized(infos, weight) else event.values["inputs"]
    mean_L = np.zeros(len(infos))
    for event in events_of(history, WEIGHTS_OFFSET):
        mean_L[int(event.values["place"])] = abs(event.values["mean"])
    rms_L = l2_L / np.array([math.sqrt(max(1, math.prod(info.shape))) for info in infos])
    return np.asarray(np.fmax(rms_L * np.sqrt(inputs_L), mean_L * inputs_L), np.float64)


def embedding_gains(history: History) -> NDArray[np.float64]:
    """Return the gain of each embedding that acts as a matrix, of shape (L,), or nan for every other tensor."""
    infos, l2_L = history.info.layers, history.param.window("weight.l2")[0]
    rms_L = np.array([float(l2) / math.sqrt(math.prod(info.shape)) for l2, info in zip(l2_L, infos, strict=True)])
    gain_L = np.full(len(infos), math.nan)
    for event in events_of(history, EMBEDDING_PRODUCT):
        pair = [int(event.values["first"]), int(event.values["second"])]
        # a table may be in several products: the largest counts
        gain_L[pair] = np.fmax(gain_L[pair], math.prod(rms_L[pair]) * math.sqrt(event.values["dimension"]))
    for event in events_of(history, TIED_EMBEDDING):
        # only a normalization before a tied output fixes the size of its input
        if event.values["normalised"]:
            weight = int(event.values["weight"])
            gain_L[weight] = rms_L[weight] * math.sqrt(event.values["dimension"])
    return gain_L


def _fan_in(info: LayerInfo) -> int:
    """Return the number of inputs that a weight sums, or a lower bound for a transposed convolution."""
    inputs = math.prod(info.shape[1:])
    return max(inputs, info.shape[0]) if info.module_type.startswith("ConvTranspose") else inputs


def _multiplies(infos: tuple[LayerInfo, ...], i: int) -> bool:
    """Return whether a tensor is a weight that multiplies the signal, without a normalization after it."""
    is_weight = len(infos[i].shape) >= 2 and infos[i].module_type.startswith(("Linear", "Conv", *RECURRENT_PREFIXES))
    # what no input meets has another name, such as the deviations of a weight that a Bayesian layer draws at each step
    is_named_so = infos[i].name.rpartition(".")[2].startswith("weight")
    return is_weight and is_named_so and not is_normalized(infos, i)
