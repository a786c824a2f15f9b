"""The largest eigenvalue of a symmetric matrix is found, and the error bar contains an eigenvalue."""

import math

import pytest
import torch

from gradwatch.probe.hessian.lanczos import KEPT_BASIS, MAX_BASIS, largest_eigenvalue

SIZE = 120


def symmetric(eigenvalues, dtype):
    """A matrix with these eigenvalues and random eigenvectors."""
    generator = torch.Generator().manual_seed(0)
    vectors, _ = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64))
    return ((vectors * torch.tensor(eigenvalues, dtype=torch.float64)) @ vectors.T).to(dtype)


def find(matrix, *, tolerance=1e-2, max_products=100, seed=1):
    start = torch.randn(len(matrix), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(matrix)
    epsilon = torch.finfo(matrix.dtype).eps
    return largest_eigenvalue(
        lambda v: matrix @ v, start, max_products=max_products, tolerance=tolerance, epsilon=epsilon
    )


BULK = [0.1 * math.sin(i) for i in range(SIZE - 3)]
SPECTRA = {
    "outliers": [*BULK, 5.0, 8.0, 10.0],
    "negative-dominant": [*BULK, -1000.0, 0.5, 1.5],
    "all-negative": [-float(i) for i in range(1, SIZE + 1)],
    "evenly-spaced": [i / SIZE for i in range(1, SIZE + 1)],
    "decaying": [1 / i**2 for i in range(1, SIZE + 1)],
    "rank-one": [0.0] * (SIZE - 1) + [3.0],
    "negative-rank-one": [0.0] * (SIZE - 1) + [-3.0],
    "multiple": [0.0] * (SIZE - 5) + [2.0] * 5,
    "identity": [2.0] * SIZE,
    "zero": [0.0] * SIZE,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SPECTRA)
def test_an_eigenvalue_lies_within_the_error_and_no_eigenvalue_is_much_larger(name, dtype):
    largest, scale = max(SPECTRA[name]), max(map(abs, SPECTRA[name]))

    found = find(symmetric(SPECTRA[name], dtype))

    # the matrix itself is rounded to its dtype
    rounding = 20 * torch.finfo(dtype).eps * scale
    assert found.converged
    assert min(abs(found.value - eigenvalue) for eigenvalue in SPECTRA[name]) <= found.error + rounding
    assert found.error <= 1e-2 * abs(found.value) + rounding
    # a larger one may be near if the eigenvalues lie closer together than the error
    gap = 1 / SIZE if name == "evenly-spaced" else 0.0
    assert largest - found.value <= found.error + gap + rounding


def test_the_error_is_the_norm_of_the_residual_of_a_unit_vector():
    matrix = symmetric(SPECTRA["outliers"], torch.float64)

    found = find(matrix, max_products=6, tolerance=0.0)

    residual = matrix @ found.vector - found.value * found.vector
    assert found.error == pytest.approx(float(residual.norm()))
    assert float(found.vector.norm()) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(5))
def test_of_a_cluster_one_eigenvalue_lies_within_the_error_and_a_small_tolerance_finds_the_largest(seed):
    cluster = [4.98, 4.99, 5.0]
    matrix = symmetric([*BULK, *cluster], torch.float64)

    coarse, fine = find(matrix, seed=seed), find(matrix, tolerance=1e-5, seed=seed)

    assert min(abs(coarse.value - eigenvalue) for eigenvalue in cluster) <= coarse.error
    assert abs(fine.value - 5.0) <= fine.error <= 5e-5


def test_an_invariant_subspace_ends_the_iteration_early():
    # the start and the only eigenvector with a value span all that products reach; one more product gives the error
    assert find(symmetric(SPECTRA["rank-one"], torch.float64)).products == 3


def test_restarts_reach_the_accuracy_of_a_basis_without_limit(monkeypatch):
    matrix = symmetric(SPECTRA["evenly-spaced"], torch.float64)

    restarted = find(matrix, tolerance=1e-6)
    monkeypatch.setattr("gradwatch.probe.hessian.lanczos.MAX_BASIS", SIZE)
    unlimited = find(matrix, tolerance=1e-6)

    assert restarted.products > 2 * MAX_BASIS - KEPT_BASIS, "it has restarted more than once"
    assert restarted.converged
    assert restarted.value == pytest.approx(1.0, abs=restarted.error)
    assert restarted.products <= 1.5 * unlimited.products


def test_an_iteration_that_runs_out_of_products_says_so():
    matrix = symmetric(SPECTRA["evenly-spaced"], torch.float64)

    found = find(matrix, max_products=8, tolerance=1e-6)

    assert found.products == 8
    assert not found.converged
    assert found.error > 1e-6
