"""Losses that cannot tell the samples of a batch apart are reported; those of games and of equations are not."""

# N = samples, C = classes

import pytest
import torch
from torch.nn import functional as F

from gradwatch.probe.batches.sample_contrast import MAX_STEPS, SampleContrast

N, C = 32, 5


def seen(loss_of, *, width=1, is_linear=True, saved_at=None, steps=MAX_STEPS, dtype=torch.float32):
    """Return the kinds of events of outputs that drift, with `loss_of(outputs, step)`."""
    torch.manual_seed(0)
    contrast, found = SampleContrast(), []
    for step in range(steps):
        if contrast.is_over:
            break
        if step == saved_at:
            saved, contrast = contrast.state(), SampleContrast()
            contrast.restore(saved)
        outputs = (torch.randn(N, width) + 0.2 * step).to(dtype).requires_grad_()
        loss = loss_of(outputs, step)
        loss.backward()
        values = (t.detach().double().numpy() for t in (outputs, outputs.grad))
        observation = contrast.add(*values, loss.item(), is_linear=is_linear)
        found += [observation.kind] if observation else []
    return found


def square_of_mean(outputs, step):
    return (outputs.mean() - step).square()


def one_target(outputs, step):
    return F.mse_loss(outputs[:, 0], torch.tensor(float(step)).expand(N))


def label_of(cls):
    return lambda outputs, step: F.cross_entropy(outputs, torch.full((N,), cls(step)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_square_of_a_mean_is_reported_once(dtype):
    assert seen(square_of_mean, dtype=dtype) == ["outputs-averaged"]
    assert seen(lambda outputs, step: (outputs.mean() - step).abs() * (1 + step), dtype=dtype) == ["outputs-averaged"]


def test_one_target_for_each_batch_is_reported():
    assert seen(one_target) == ["targets-shared"]


def test_labels_of_one_class_are_reported():
    assert seen(label_of(lambda step: 2), width=C) == ["labels-equal"]


def test_a_restored_reader_goes_on():
    assert seen(square_of_mean, saved_at=3, steps=4) == ["outputs-averaged"]
    assert seen(one_target, saved_at=3, steps=4) == ["targets-shared"]
    assert seen(label_of(lambda step: 2), width=C, saved_at=7, steps=8) == ["labels-equal"]


@pytest.mark.parametrize(
    "loss_of",
    [
        pytest.param(lambda outputs, step: outputs.mean(), id="the value of a critic"),
        pytest.param(lambda outputs, step: (outputs - step % 2).square().mean(), id="samples that are real or not"),
        pytest.param(lambda outputs, step: outputs.square().mean(), id="an equation that must be zero"),
        pytest.param(lambda outputs, step: F.mse_loss(outputs, torch.randn(N, 1)), id="targets of their own"),
        pytest.param(lambda outputs, step: square_of_mean(outputs, step) + outputs.square().mean(), id="a penalty"),
    ],
)
def test_other_losses_are_not(loss_of):
    assert seen(loss_of) == []


def test_labels_that_differ_are_not():
    assert seen(label_of(lambda step: step % 2), width=C) == []
    assert seen(lambda outputs, step: F.cross_entropy(outputs, torch.randint(0, C, (N,))), width=C) == []


def test_two_classes_or_similarities_say_nothing():
    assert seen(label_of(lambda step: 0), width=2) == []
    assert seen(label_of(lambda step: 0), width=C, is_linear=False) == []
