"""Gradients that were scaled are the same ones; what was written over them is another."""

import pytest
import torch

from gradwatch.probe.gradients.gradient_sample import GradientSample, is_continued

GRAD = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))


def goes_on(sample, grad):
    numbers_2N = sample.numbers_with(grad)
    return numbers_2N is None or is_continued(numbers_2N.numpy())


@pytest.mark.parametrize(
    "change",
    [
        lambda grad: grad,
        lambda grad: grad.mul_(0.1),
        lambda grad: grad / 3,
        lambda grad: grad.neg(),
        lambda grad: grad.clamp(-0.5, 0.5),
        lambda grad: grad.bfloat16(),
        lambda grad: grad * float("inf"),
    ],
)
def test_a_gradient_that_was_scaled_or_clipped_goes_on(change):
    grad = GRAD.clone()
    sample = GradientSample(grad)

    assert goes_on(sample, change(grad))


@pytest.mark.parametrize(
    "change",
    [
        lambda grad: grad.copy_(torch.randn_like(grad)),
        lambda grad: grad + torch.randn_like(grad),
        lambda grad: grad.roll(1),
    ],
)
def test_another_that_was_written_over_it_does_not(change):
    torch.manual_seed(1)
    grad = GRAD.clone()
    sample = GradientSample(grad)

    assert not goes_on(sample, change(grad))


def test_zeros_that_became_something_are_another():
    grad = torch.zeros(16)
    sample = GradientSample(grad)

    assert not goes_on(sample, grad.copy_(torch.arange(16.0)))


@pytest.mark.parametrize(
    "grad", [torch.ones(3), torch.ones(4, 4).to_sparse(), torch.ones(16, dtype=torch.complex64), torch.ones(0, 5)]
)
def test_one_of_which_too_little_is_known_is_taken_for_the_same(grad):
    sample = GradientSample(grad)

    assert goes_on(sample, torch.randn(grad.shape))


@pytest.mark.parametrize("shape", [(16,), (1, 1, 40), (5, 2, 3, 3), (300, 2)])
def test_leading_numbers_are_read_of_any_shape_and_layout(shape):
    grad = torch.randn(shape)
    sample = GradientSample(grad)

    assert goes_on(sample, grad * 2)
    assert not goes_on(sample, torch.randn(shape))
    assert goes_on(GradientSample(grad.transpose(0, -1)), grad.transpose(0, -1) * 2)
