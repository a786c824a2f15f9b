"""Which parameter tensors can be compared with each other, and in which order the gradient passes through them."""

# T = steps of a window, L = parameter tensors, M = weight matrices and kernels, K = tensors of modules that have one,
# D = modules that have one

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.robust_stats import Floats, log10
from gradwatch.history.store import History
from gradwatch.records import LayerInfo

RECURRENT = ("RNN", "LSTM", "GRU")
"""Module types that hold several layers, one after the other: `weight_ih_l0` belongs to the first of them."""

NEAR_ZERO = 0.05
"""Size of a weight matrix, in units of the one that keeps the size of the signal, below which it started near zero."""

NUMBERS = 16
"""Elements of a parameter that is a few numbers, such as a coefficient of a formula."""

SELDOM_READ = ("Embedding", "EmbeddingBag")
"""Module types whose gradient holds only the rows that a batch looked up: its size says how many those were."""


@final
@dataclass(frozen=True, slots=True)
class Depth:
    """What follows from the names and shapes of a run's parameters alone.

    Attributes:
        trainable_L: Whether a tensor required a gradient when the monitor attached.
        num_trainable: How many do.
        root_numel_L: Square root of the number of elements: an L2 norm divided by it is a root mean square.
        matrices_M: Trainable weight matrices and kernels in the order of the model, without embeddings.
        moved_M: Those of them that an optimizer holds.
        tables_E: Trainable embeddings.
        root_fan_out_M: Root of the number of outputs: the norm of a weight that keeps the size of the signal.
        weights_W: The matrices, or the embeddings of a model that has nothing else: what a rate is chosen for.
        root_rows_W: Roots of the numbers of their rows: such a norm have rows of length 1, whatever they are for.
        chain_K: These and the other trainable tensors of their modules (biases), module after module; of recurrent
            modules layer after layer.
        starts_D: Where each module, or layer of a recurrent one, starts in `chain_K`.
        blocks_D: Which block each of these modules belongs to: that of all which lie in one module without others
            between them, as filter and gate of a layer do.
        few_F: Trainable tensors that are a few numbers, and no biases, which may well end near zero.
        apart_P: Trainable tensors that are neither weight matrices nor biases, in a model that has some of these.
        bias_M: Bias of the module of each weight matrix, -1 where it has none.
        units_L: Whether a tensor has one element per unit: biases, and weights of modules that have no such tensor.
        output_bias: Bias of the last module with a weight matrix, or None where it has none.
        unowned: Trainable tensors that no optimizer holds.
        frozen: Tensors that were not trainable when watching began, and that no optimizer holds.
    """

    trainable_L: NDArray[np.bool_]
    num_trainable: int
    root_numel_L: NDArray[np.float32]
    matrices_M: NDArray[np.intp]
    moved_M: NDArray[np.intp]
    tables_E: NDArray[np.intp]
    root_fan_out_M: NDArray[np.float32]
    weights_W: NDArray[np.intp]
    root_rows_W: NDArray[np.float32]
    chain_K: NDArray[np.intp]
    starts_D: NDArray[np.intp]
    blocks_D: NDArray[np.intp]
    few_F: NDArray[np.intp]
    apart_P: NDArray[np.intp]
    bias_M: NDArray[np.intp]
    units_L: NDArray[np.bool_]
    output_bias: int | None
    unowned: tuple[int, ...]
    frozen: tuple[int, ...]


_known: WeakKeyDictionary[History, Depth] = WeakKeyDictionary()


def depth(history: History) -> Depth:
    """Return the depth of a history's model. It cannot change while a run goes on, so it is worked out once."""
    found = _known.get(history)
    if found is None:
        found = _known[history] = _measure(history.info.layers)
    return found


def is_matrix(layer: LayerInfo) -> bool:
    """Say whether a tensor is a weight matrix or kernel whose gradient is full at every step."""
    return layer.trainable and len(layer.shape) >= 2 and layer.module_type not in SELDOM_READ


def stage(layer: LayerInfo) -> tuple[str, str]:
    """Return what a tensor stands in a line with: its module, and its layer in a recurrent one or in a list of them."""
    if layer.module_type == "ParameterList" and is_matrix(layer):
        return layer.module, layer.name
    place = re.search(r"_l\d+", layer.name) if layer.module_type in RECURRENT else None
    return layer.module, place.group() if place else ""


def matrix_sizes(history: History, l2_L: Floats) -> Floats:
    """Return the size of a gradient element in each weight matrix.

    Root mean square per element: tensors differ in size, this can be compared between them.

    Args:
        history: Whose tensors.
        l2_L: L2 norm of each gradient, of shape (L,), or (D, L) for several steps.

    Returns:
        Sizes of shape (M,) or (D, M), nan where a norm is missing.
    """
    shape = depth(history)
    sizes_M: Floats = l2_L[..., shape.matrices_M] / shape.root_numel_L[shape.matrices_M]
    return sizes_M


def module_levels(history: History, l2_L: Floats) -> Floats:
    """Return the size of a gradient element in each module with a weight matrix, as a power of ten.

    A module counts by its tensor with the largest elements: the gradient of a weight is small also where the signal
    that came forward is, the bias shows what came back.

    Returns:
        Levels of shape (D,), input side first, nan where all norms are zero or missing.
    """
    shape = depth(history)
    rms_K = l2_L[shape.chain_K] / shape.root_numel_L[shape.chain_K]
    return log10(np.fmax.reduceat(rms_K, shape.starts_D))


def block_levels(history: History, level_D: Floats) -> Floats:
    """Return the largest level of the modules of each block, in the order of the model, nan left out.

    What stands side by side in a block gets parts of one gradient, of which a gate's may be far the smaller.
    """
    blocks_D = depth(history).blocks_D
    levels_B = np.full(int(blocks_D[-1]) + 1, np.nan)
    np.fmax.at(levels_B, blocks_D, level_D)
    return levels_B


def spread(history: History) -> float:
    """Return the ratio of the largest to the smallest gradient element over the modules, at the newest step.

    It takes a microsecond where `module_levels` of a window takes many: a profile over depth cannot be steep where its
    ends are alike. Where a gradient is zero or missing nothing is known, and the ratio is infinite.
    """
    return float(spreads(history, history.param.newest("grad.l2")))


def spreads(history: History, l2_TL: Floats) -> Floats:
    """Return the same at several steps: shape (T,), or () for gradients of one step, of shape (L,)."""
    shape = depth(history)
    rms_TK = l2_TL[..., shape.chain_K] / shape.root_numel_L[shape.chain_K]
    level_TD = np.maximum.reduceat(rms_TK, shape.starts_D, axis=-1)[..., :-1]
    low_T, high_T = level_TD.min(axis=-1).astype(np.float64), level_TD.max(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(low_T > 0, high_T / low_T, np.inf)  # nan is not above 0


def _measure(layers: tuple[LayerInfo, ...]) -> Depth:
    trainable_L = np.array([layer.trainable for layer in layers], np.bool_)
    matrices = [i for i, layer in enumerate(layers) if is_matrix(layer)]
    parts: dict[tuple[str, str], list[int]] = {stage(layers[i]): [] for i in matrices}
    for i, layer in enumerate(layers):
        if layer.trainable and stage(layer) in parts:
            parts[stage(layer)].append(i)
    with_bias = {layer.module for layer in layers if layer.trainable and len(layer.shape) == 1}
    units_L = [
        layer.trainable
        and (len(layer.shape) == 1 or layer.module not in with_bias)
        and layer.module_type not in SELDOM_READ
        for layer in layers
    ]
    last = next(reversed(parts.values()), [])
    sizes = [len(part) for part in parts.values()]
    vectors = Counter(la.module for la in layers if la.trainable and len(la.shape) == 1)
    bias_of = {la.module: i for i, la in enumerate(layers) if len(la.shape) == 1 and vectors[la.module] == 1}
    parents = [module.rpartition(".")[0] or module for module, _ in parts]
    starts_block = [a != b for a, b in pairwise(["", *parents])]
    tables = [i for i, layer in enumerate(layers) if layer.trainable and layer.module_type in SELDOM_READ]
    unbiased = [i for i, layer in enumerate(layers) if layer.trainable and not layer.name.endswith("bias")]
    return Depth(
        trainable_L=trainable_L,
        num_trainable=int(trainable_L.sum()),
        root_numel_L=np.array([math.sqrt(max(1, math.prod(layer.shape))) for layer in layers], np.float32),
        matrices_M=np.array(matrices, np.intp),
        moved_M=np.array([i for i in matrices if layers[i].group is not None], np.intp),
        tables_E=np.array(tables, np.intp),
        root_fan_out_M=np.array([math.sqrt(layers[i].shape[0]) for i in matrices], np.float32),
        weights_W=np.array(matrices or tables, np.intp),
        root_rows_W=np.array([math.sqrt(layers[i].shape[0]) for i in matrices or tables], np.float32),
        chain_K=np.array([i for part in parts.values() for i in part], np.intp),
        starts_D=np.cumsum([0, *sizes[:-1]], dtype=np.intp),
        blocks_D=np.cumsum(starts_block, dtype=np.intp) - 1,
        few_F=np.array([i for i in unbiased if math.prod(layers[i].shape) <= NUMBERS], np.intp),
        apart_P=np.array([i for i in unbiased if matrices and not is_matrix(layers[i])], np.intp),
        bias_M=np.array([bias_of.get(layers[i].module, -1) for i in matrices], np.intp),
        units_L=np.array(units_L, np.bool_),
        output_bias=next((i for i in reversed(last) if len(layers[i].shape) == 1), None),
        unowned=tuple(i for i, layer in enumerate(layers) if layer.trainable and layer.group is None),
        frozen=tuple(i for i, layer in enumerate(layers) if not layer.trainable and layer.group is None),
    )
