"""Find the largest eigenvalue of a symmetric operator by Lanczos iteration, with an error bar."""

# N = elements of a vector, K = vectors of the basis

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.probe.device.sync import to_float, to_host

MAX_BASIS = 16
"""Vectors of the basis, which bound the memory. On evenly spaced eigenvalues, 64 vectors would save none of 29
products."""
KEPT_BASIS = 4
"""Approximate eigenvectors that a restart keeps; Wu and Simon 2000, doi:10.1137/S0895479898334605, sec. 3."""
ROUNDING_EPS = 16
"""Residual that rounding leaves, in epsilons of the dtype, relative to the largest magnitude of an eigenvalue."""


class Eigenpair(NamedTuple):
    """An approximate eigenvalue of a symmetric operator.

    Args:
        value: Rayleigh quotient of the vector.
        vector: The vector, shape (N,), norm 1.
        error: Norm of the residual of the pair. An exact eigenvalue lies within this distance of the value
            (Parlett 1998, doi:10.1137/1.9781611971163, theorem 4.5.1). If several eigenvalues lie closer together
            than the error, it need not be the largest of them.
        products: Number of products with the operator.
        converged: Whether the error is within the tolerance.
    """

    value: float
    vector: Tensor
    error: float
    products: int
    converged: bool


def largest_eigenvalue(
    times: Callable[[Tensor], Tensor], start: Tensor, *, max_products: int, tolerance: float, epsilon: float
) -> Eigenpair:
    """Find the algebraically largest eigenvalue of a symmetric operator.

    The basis is orthogonalized in full, and restarted from its best vectors when it is long (thick restart). The last
    product measures the residual itself, because the recurrence underestimates it once rounding dominates.

    torch.lobpcg takes a matrix, not a function that multiplies with a vector. ARPACK (scipy.sparse.linalg.eigsh) keeps
    its vectors in host memory, and scipy is not a dependency.

    Args:
        times: Multiplies the operator with a vector of shape (N,).
        start: First vector, shape (N,), float32 or float64, not 0. It should be random: an eigenvector orthogonal to
            it is not found.
        max_products: Maximum number of products, at least 2.
        tolerance: Error at which to stop, relative to the eigenvalue.
        epsilon: Epsilon of the dtype in which the products are computed.
    """
    basis_KN = start.new_empty(MAX_BASIS, len(start))
    basis_KN[0] = start / to_float(torch.linalg.vector_norm(start))
    projected_KK = np.zeros((MAX_BASIS, MAX_BASIS))
    size = products = 0
    while True:
        image = times(basis_KN[size])
        products, size = products + 1, size + 1
        column = _orthogonalize(image, basis_KN[:size])
        projected_KK[size - 1, :size] = projected_KK[:size, size - 1] = column
        values, vectors_KK = np.linalg.eigh(projected_KK[:size, :size])
        length = to_float(torch.linalg.vector_norm(image))
        bound = _bound(values, tolerance, epsilon)
        is_invariant = length <= _rounding(values, epsilon)  # the basis holds all that the start reaches
        if is_invariant or length * abs(vectors_KK[-1, -1]) <= bound or products == max_products - 1:
            break
        if size == MAX_BASIS:
            basis_KN[:KEPT_BASIS] = _combine(vectors_KK[:, -KEPT_BASIS:], basis_KN)
            projected_KK[:] = 0.0
            size = KEPT_BASIS
            projected_KK[:size, :size] = np.diag(values[-size:])
        basis_KN[size] = image / length
    vector = _combine(vectors_KK[:, -1:], basis_KN[:size])[0]
    vector /= to_float(torch.linalg.vector_norm(vector))
    image = times(vector)
    value = to_float(torch.dot(vector.double(), image.double()))
    error = to_float(torch.linalg.vector_norm(image.double() - value * vector.double()))
    is_accurate = error <= max(tolerance * abs(value), _rounding(values, epsilon))
    return Eigenpair(value, vector, error, products + 1, is_accurate)


def _orthogonalize(vector: Tensor, basis_KN: Tensor) -> NDArray[np.float64]:
    """Remove the components in a basis from a vector, in place, and return them."""
    total_K = np.zeros(len(basis_KN))
    for _ in range(2):  # twice is enough: Parlett 1998, sec. 6.9
        components_K = basis_KN @ vector
        vector -= components_K @ basis_KN
        total_K += to_host(components_K)
    return total_K


def _combine(weights_KM: NDArray[np.float64], basis_KN: Tensor) -> Tensor:
    return torch.from_numpy(weights_KM.T.copy()).to(basis_KN) @ basis_KN


def _bound(values: NDArray[np.float64], tolerance: float, epsilon: float) -> float:
    return max(tolerance * abs(float(values[-1])), _rounding(values, epsilon))


def _rounding(values: NDArray[np.float64], epsilon: float) -> float:
    return ROUNDING_EPS * epsilon * float(np.abs(values).max())
