"""Both ends of the spectrum lie within their errors of the exact ones, and say how the loss bends."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradwatch
from gradwatch.errors import GradwatchError


def diagonal(*curvatures):
    """A model, and a loss whose Hessian has these eigenvalues."""
    values = torch.tensor(curvatures, dtype=torch.float64)
    model = nn.ParameterDict({"w": torch.ones(len(curvatures), dtype=torch.float64)})
    return model, lambda: (values * model["w"] ** 2).sum() / 2


@pytest.mark.parametrize(
    ("curvatures", "shape"),
    [
        ((3.0, 1.0, 0.5), "bends up"),
        ((3.0, 1.0, 0.0), "bends up"),
        ((3.0, 1.0, -0.2), "saddle"),
        ((-3.0, -1.0, -0.5), "bends down"),
        ((0.2, -50.0, 1.0), "saddle"),
    ],
)
def test_the_ends_and_the_shape_are_those_of_the_eigenvalues(curvatures, shape):
    model, loss = diagonal(*curvatures)

    found = gradwatch.spectrum(model, loss)

    assert abs(found.largest - max(curvatures)) <= found.largest_error + 1e-12
    assert abs(found.smallest - min(curvatures)) <= found.smallest_error + 1e-12
    assert (found.shape, found.converged) == (shape, True)
    assert found.slope == pytest.approx(torch.tensor(curvatures).norm().item())


def test_the_spectrum_of_a_network_is_that_of_its_exact_hessian():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, y = torch.randn(9, 3).double(), torch.randint(0, 2, (9,))
    names, shapes = zip(*[(n, p.shape) for n, p in model.named_parameters()], strict=True)

    def of_flat(flat):
        parts = [v.view(s) for v, s in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]
        outputs = torch.func.functional_call(model, dict(zip(names, parts, strict=True)), (x,))
        return functional.cross_entropy(outputs, y)

    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    exact = torch.linalg.eigvalsh(torch.autograd.functional.hessian(of_flat, flat))

    found = gradwatch.spectrum(model, lambda: functional.cross_entropy(model(x), y))

    assert found.converged
    assert abs(found.largest - float(exact[-1])) <= found.largest_error
    assert abs(found.smallest - float(exact[0])) <= found.smallest_error
    assert f"{found.smallest:.3g} +/- " in str(found)
    assert "a saddle" in str(found)


def test_a_loss_without_curvature_and_too_few_products_are_mistakes():
    model = nn.Linear(3, 1)

    with pytest.raises(GradwatchError, match="spectrum: the loss is linear in every parameter"):
        gradwatch.spectrum(model, lambda: model(torch.ones(2, 3)).sum())
    with pytest.raises(GradwatchError, match="spectrum: max_products is 4, expected at least 5"):
        gradwatch.spectrum(model, lambda: model(torch.ones(2, 3)).square().sum(), max_products=4)
