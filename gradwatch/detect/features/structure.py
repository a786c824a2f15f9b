"""Derive the structure of a model from the names and shapes of its parameters.

The structure says which tensors compare and in which order. Indices of tensors are positions in `RunInfo.layers`.
"""

# T = steps of a window, L = parameter tensors, M = weight matrices and kernels, O = matrices that an optimizer holds,
# B = matrices with a bias, W = weights that a rate is chosen for, K = tensors of modules that have a matrix,
# D = modules that have one, E = embeddings, F = coefficients, P = other parameters

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Self, final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.robust_stats import Floats
from gradwatch.history.store import History
from gradwatch.records import LayerInfo

RECURRENT_MODULES = ("RNN", "LSTM", "GRU")
"""Module types that hold several layers in a row: `weight_ih_l0` belongs to the first layer."""

LOOKUP_MODULES = ("Embedding", "EmbeddingBag")
"""Module types in which the gradient holds only the rows that a batch looked up: its size depends on their number."""

NEAR_ZERO_GAIN = 0.05
"""Norm of a weight matrix, in units of `signal_norm_M`, below which the matrix started near zero."""


@final
@dataclass(frozen=True, slots=True)
class Matrices:
    """The trainable weight matrices and kernels in model order, without embeddings.

    Attributes:
        indices_M: Tensor indices of the matrices.
        optimized_O: Tensor indices of the matrices that an optimizer holds.
        signal_norm_M: Norm of a weight that keeps the size of a signal: the root of its number of outputs.
        bias_M: Tensor index of the bias in the same module, -1 if the module has none.
        biased_B: Positions, among the matrices, of the matrices with a bias.
    """

    indices_M: NDArray[np.intp]
    optimized_O: NDArray[np.intp]
    signal_norm_M: NDArray[np.float32]
    bias_M: NDArray[np.intp]
    biased_B: NDArray[np.intp]

    @classmethod
    def of(cls, layers: tuple[LayerInfo, ...]) -> Self:
        """Select the weight matrices of a model."""
        indices = [i for i, layer in enumerate(layers) if is_matrix(layer)]
        num_vectors = Counter(la.module for la in layers if la.trainable and len(la.shape) == 1)
        # a module with several vectors has no single bias: a normalization has a weight and a bias
        bias_of = {la.module: i for i, la in enumerate(layers) if len(la.shape) == 1 and num_vectors[la.module] == 1}
        bias_M = np.array([bias_of.get(layers[i].module, -1) for i in indices], np.intp)
        return cls(
            indices_M=np.array(indices, np.intp),
            optimized_O=np.array([i for i in indices if layers[i].group is not None], np.intp),
            signal_norm_M=np.array([math.sqrt(layers[i].shape[0]) for i in indices], np.float32),
            bias_M=bias_M,
            biased_B=np.flatnonzero(bias_M >= 0),
        )


@final
@dataclass(frozen=True, slots=True)
class RateWeights:
    """The weights that a learning rate is chosen for: the matrices, or the embeddings of a model without matrices.

    Attributes:
        indices_W: Tensor indices of the weights.
        unit_norm_W: Norm of each weight if its rows had length 1: the root of its number of rows.
    """

    indices_W: NDArray[np.intp]
    unit_norm_W: NDArray[np.float32]


@final
@dataclass(frozen=True, slots=True)
class ModuleChain:
    """The modules with a weight matrix, input side first: the path of the gradient through the model.

    Attributes:
        indices_K: Trainable tensors of the modules, module after module; in recurrent modules layer after layer.
        starts_D: Start of each module, or of each layer of a recurrent module, in `indices_K`.
        blocks_D: Block of each module. Modules share a block if one module holds them and no other module lies between
            them, such as the filter and the gate of a layer.
        output_bias: Tensor index of the bias of the last module, or None if it has none.
    """

    indices_K: NDArray[np.intp]
    starts_D: NDArray[np.intp]
    blocks_D: NDArray[np.intp]
    output_bias: int | None

    @classmethod
    def of(cls, layers: tuple[LayerInfo, ...]) -> Self:
        """Group the trainable tensors by module and keep the modules with a weight matrix."""
        groups: dict[tuple[str, str], list[int]] = {chain_key(la): [] for la in layers if is_matrix(la)}
        for i, layer in enumerate(layers):
            if layer.trainable and chain_key(layer) in groups:
                groups[chain_key(layer)].append(i)
        sizes = [len(group) for group in groups.values()]
        # a top-level module has no parent, so it is a separate block
        parents = [module.rpartition(".")[0] or module for module, _ in groups]
        # only neighbors share a block, so a parent that comes again starts a new one
        starts_block = [a != b for a, b in pairwise(["", *parents])]
        last = next(reversed(groups.values()), [])
        return cls(
            indices_K=np.array([i for group in groups.values() for i in group], np.intp),
            starts_D=np.cumsum([0, *sizes[:-1]], dtype=np.intp),
            blocks_D=np.cumsum(starts_block, dtype=np.intp) - 1,
            output_bias=next((i for i in reversed(last) if len(layers[i].shape) == 1), None),
        )


@final
@dataclass(frozen=True, slots=True)
class ModelStructure:
    """Structure of a run's model, from the names and shapes of its parameters.

    Attributes:
        matrices: The weight matrices.
        rate_weights: The weights that a learning rate is chosen for.
        chain: The modules with a weight matrix in the order of the gradient.
        is_trainable_L: Whether a tensor has elements and required a gradient when the monitor attached.
        num_trainable: Number of tensors that required a gradient then.
        rms_scale_L: Root of the number of elements: an L2 norm divided by it is a root mean square.
        is_per_unit_L: Whether a tensor has one element per unit: biases, and weights of modules without a bias.
        embeddings_E: Trainable embeddings.
        unowned: Trainable tensors that no optimizer holds.
        frozen: Tensors that were not trainable when the monitor attached, and that no optimizer holds.
    """

    matrices: Matrices
    rate_weights: RateWeights
    chain: ModuleChain
    is_trainable_L: NDArray[np.bool_]
    num_trainable: int
    rms_scale_L: NDArray[np.float32]
    is_per_unit_L: NDArray[np.bool_]
    embeddings_E: NDArray[np.intp]
    unowned: tuple[int, ...]
    frozen: tuple[int, ...]

    @classmethod
    def of(cls, layers: tuple[LayerInfo, ...]) -> Self:
        """Derive the structure of a model from its parameters."""
        matrices = Matrices.of(layers)
        # a tensor without elements has nothing to train
        is_trainable_L = np.array([layer.trainable and 0 not in layer.shape for layer in layers], np.bool_)
        embeddings = [i for i, layer in enumerate(layers) if layer.trainable and layer.module_type in LOOKUP_MODULES]
        # a model without matrices, such as a factorization, learns by its embeddings
        rated = matrices.indices_M.tolist() or embeddings
        return cls(
            matrices=matrices,
            rate_weights=RateWeights(
                np.array(rated, np.intp), np.array([math.sqrt(layers[i].shape[0]) for i in rated], np.float32)
            ),
            chain=ModuleChain.of(layers),
            is_trainable_L=is_trainable_L,
            num_trainable=int(is_trainable_L.sum()),
            # max: a tensor without elements must not divide by 0
            rms_scale_L=np.array([math.sqrt(max(1, math.prod(layer.shape))) for layer in layers], np.float32),
            is_per_unit_L=_is_per_unit(layers),
            embeddings_E=np.array(embeddings, np.intp),
            unowned=tuple(i for i, layer in enumerate(layers) if layer.trainable and layer.group is None),
            frozen=tuple(i for i, layer in enumerate(layers) if not layer.trainable and layer.group is None),
        )


_known: WeakKeyDictionary[History, ModelStructure] = WeakKeyDictionary()


def structure_of(history: History) -> ModelStructure:
    """Return the structure of a history's model, derived once because it cannot change during a run."""
    found = _known.get(history)
    if found is None:
        found = _known[history] = ModelStructure.of(history.info.layers)
    return found


def is_matrix(layer: LayerInfo) -> bool:
    """Return whether a tensor is a weight matrix or kernel that gets a gradient in all rows at every step."""
    return layer.trainable and len(layer.shape) >= 2 and layer.module_type not in LOOKUP_MODULES


def chain_key(layer: LayerInfo) -> tuple[str, str]:
    """Return the link of the chain that a tensor belongs to: its module, and its layer in a recurrent module."""
    # each matrix of a list is a separate layer
    if layer.module_type == "ParameterList" and is_matrix(layer):
        return layer.module, layer.name
    place = re.search(r"_l\d+", layer.name) if layer.module_type in RECURRENT_MODULES else None
    return layer.module, place.group() if place else ""


def matrix_rms(history: History, l2_L: Floats) -> Floats:
    """Return the root mean square of each weight matrix's gradient, which compares tensors of any size.

    Args:
        history: History of the run.
        l2_L: L2 norm of each gradient, of shape (L,), or (T, L) for several steps.

    Returns:
        Root mean squares of shape (M,) or (T, M), nan where a norm is missing.
    """
    structure = structure_of(history)
    indices_M = structure.matrices.indices_M
    rms_M: Floats = l2_L[..., indices_M] / structure.rms_scale_L[indices_M]
    return rms_M


def _is_per_unit(layers: tuple[LayerInfo, ...]) -> NDArray[np.bool_]:
    with_bias = {layer.module for layer in layers if layer.trainable and len(layer.shape) == 1}
    is_per_unit = [
        layer.trainable
        and (len(layer.shape) == 1 or layer.module not in with_bias)
        and layer.module_type not in LOOKUP_MODULES
        for layer in layers
    ]
    return np.array(is_per_unit, np.bool_)


def is_normalized(layers: tuple[LayerInfo, ...], i: int) -> bool:
    """Return whether the next module with parameters is a normalization, which cancels the gain of a weight."""
    following = next((other for other in layers[i + 1 :] if other.module != layers[i].module), None)
    return following is not None and "Norm" in following.module_type
