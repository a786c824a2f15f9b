"""Each sample gets the gradient that it has as a batch of its own."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradwatch
from gradwatch.errors import GradwatchError


@pytest.fixture
def given():
    torch.manual_seed(0)
    return torch.randn(5, 3), torch.randn(5, 2)


def one_by_one(step, batch, model):
    """Return the gradients of batches of one sample: names to lists."""
    found = {name: [] for name, _ in model.named_parameters()}
    for i in range(len(batch[0])):
        model.zero_grad()
        step(*(part[i : i + 1] for part in batch)).backward()
        for name, parameter in model.named_parameters():
            found[name].append(parameter.grad.clone())
    model.zero_grad()
    return {name: torch.stack(grads) for name, grads in found.items()}


def test_the_gradients_of_a_linear_model_are_outer_products(given):
    model = nn.Linear(3, 2)

    def step(x, y):
        return (model(x) - y).square().sum() / 2

    found = gradwatch.sample_gradients(step, *given, model=model)

    error = (model(given[0]) - given[1]).detach()
    torch.testing.assert_close(found.by_name["weight"], error[:, :, None] * given[0][:, None, :])
    torch.testing.assert_close(found.by_name["bias"], error)
    norms = error.norm(dim=1) * (given[0].norm(dim=1) ** 2 + 1).sqrt()
    torch.testing.assert_close(found.norms_B, norms.double(), rtol=1e-5, atol=0)
    assert found.method == "vmap"
    assert float(found.shares_B.sum()) == pytest.approx(1.0)
    assert str(found).splitlines()[1].split()[0] == str(int(found.shares_B.argmax()))


def test_a_step_that_cannot_be_mapped_runs_for_each_sample(given):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def step(x, y):
        scale = 2.0 if float(x.sum()) > 0 else 1.0  # vmap has no numbers
        return scale * functional.mse_loss(model(x), y)

    found = gradwatch.sample_gradients(step, *given, model=model)

    assert found.method == "loop"
    expected = one_by_one(step, given, model)
    torch.testing.assert_close(found.by_name, expected)


def test_samples_that_the_batch_mixes_are_not_taken_for_independent(given):
    model = nn.Linear(3, 2)

    def step(x, y):
        return functional.mse_loss(model(x - x.mean(0)), y)

    found = gradwatch.sample_gradients(step, *given, model=model)

    torch.testing.assert_close(found.by_name, one_by_one(step, given, model))


def test_nothing_changes(given):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval()
    model[0].weight.grad = torch.ones(2, 3)
    before, generator = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()

    gradwatch.sample_gradients(lambda x, y: functional.mse_loss(model(x), y), *given, model=model)

    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
    assert torch.equal(model[0].weight.grad, torch.ones(2, 3))
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_mistake_is_named(given):
    x, y = given
    mixing, frozen = nn.BatchNorm1d(3), nn.Linear(3, 2).requires_grad_(False)

    with pytest.raises(GradwatchError, match=r"`1` is a BatchNorm in training mode.*call model.eval\(\)"):
        gradwatch.sample_gradients(lambda x: x.sum(), x, model=nn.Sequential(nn.Linear(3, 3), mixing))
    with pytest.raises(GradwatchError, match="no trainable parameter"):
        gradwatch.sample_gradients(lambda x: x.sum(), x, model=frozen)
    with pytest.raises(GradwatchError, match="differ in their first dimension"):
        gradwatch.sample_gradients(lambda x, y: x.sum(), x, y[:3], model=nn.Linear(3, 2))
    with pytest.raises(GradwatchError, match="the step fails on one sample: KeyError"):
        gradwatch.sample_gradients(lambda x: {}["k"], x, model=nn.Linear(3, 2))
