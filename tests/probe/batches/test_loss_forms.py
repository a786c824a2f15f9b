"""A gradient whose targets are the inputs is known, whatever else is in the loss; others are not."""

# N = samples, V = values of a sample

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gradwatch.probe.batches.loss_forms import of_inputs

N, V = 12, 5

ERRORS = [
    pytest.param(lambda p, x: (p - x).square(), id="squared error"),
    pytest.param(lambda p, x: F.binary_cross_entropy_with_logits(p, x, reduction="none"), id="of logits"),
    pytest.param(lambda p, x: F.binary_cross_entropy(p, x, reduction="none"), id="of probabilities"),
]


def example(error_of, *, shape=(N, V)):
    """Return predictions, their gradient, inputs, and the error in the loss."""
    torch.manual_seed(0)
    inputs = torch.rand(shape, dtype=torch.float64)
    scores = torch.rand(shape, dtype=torch.float64, requires_grad=True)
    error = 3 * error_of(scores, inputs).mean()
    error.backward()
    return scores.detach().numpy(), scores.grad.numpy(), inputs.numpy(), error.item()


@pytest.mark.parametrize("error_of", ERRORS)
@pytest.mark.parametrize("shape", [(N, V), (N, 1, V, 2)], ids=str)
def test_the_gain_is_the_rise_of_the_error_if_each_prediction_belonged_to_another_input(error_of, shape):
    scores, gradient, inputs, error = example(error_of, shape=shape)

    found = of_inputs(scores, gradient, inputs)

    p, x = (torch.from_numpy(values).flatten(1) for values in (scores, inputs))
    errors_NN = torch.stack([torch.stack([error_of(one, other).sum() for other in x]) for one in p])
    assert found.gain.gain == pytest.approx((errors_NN.mean() - errors_NN.diag().mean()).item(), rel=1e-5)
    assert found.error == pytest.approx(error, rel=1e-5)


@pytest.mark.parametrize("error_of", ERRORS)
def test_the_best_constant_is_compared_with_the_inputs_themselves(error_of):
    scores, gradient, inputs, _ = example(error_of)
    x = torch.from_numpy(inputs)
    mean = x.mean(0).expand_as(x)
    is_logit = error_of is ERRORS[1].values[0]
    best_constant, best = (mean.logit(), x.logit()) if is_logit else (mean, x)

    expected = (error_of(best_constant, x) - error_of(best, x)).sum(1).mean()

    assert of_inputs(scores, gradient, inputs).gain.constant == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("error_of", ERRORS)
def test_other_targets_do_not_match(error_of):
    scores, gradient, inputs, _ = example(error_of)
    noisy = np.clip(inputs + 0.05 * np.random.default_rng(0).standard_normal(inputs.shape), 0, 1)

    assert of_inputs(scores, gradient, noisy) is None
    assert of_inputs(scores, -gradient, inputs) is None
