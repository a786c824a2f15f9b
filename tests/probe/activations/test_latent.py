"""A latent that tells nothing is reported, and once it does again; what only looks like one is not."""

# B = samples, D = dimensions of a latent

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

from gradwatch.probe.activations.latent import SEARCHED_STEPS, UNUSED_READS, LatentReader
from gradwatch.probe.output_reader import ForwardCall

B, D = 16, 3


class Autoencoder(nn.Module):
    """An encoder of which the deviation of each dimension is set by hand."""

    def __init__(self, draw):
        super().__init__()
        self.head, self.decoder, self.draw = nn.Linear(4, 2 * D), nn.Linear(D, 4), draw
        nn.init.normal_(self.head.weight, std=1e-3)
        nn.init.zeros_(self.head.bias)

    def forward(self, x, log_deviation):
        mean, log_var = self.head(x).chunk(2, 1)
        log_var = log_var + 2 * log_deviation
        return self.decoder(self.draw(mean, log_var)), mean, log_var


def by_hand(mean, log_var):
    return mean + torch.randn_like(mean) * torch.exp(0.5 * log_var)


def by_torch(mean, log_var):
    return Normal(mean, (log_var / 2).exp()).rsample()


def summed(mean, log_var):
    return -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1).mean()


def of_torch(mean, log_var):
    return kl_divergence(Normal(mean, (0.5 * log_var).exp()), Normal(0.0, 1.0)).sum(1).mean()


def seen(deviations, *, draw=by_hand, divergence=summed, samples=B, saved_at=None):
    """Return the observations of steps with these standard deviations, and whether the reader is over."""
    torch.manual_seed(0)
    model, found = Autoencoder(draw), []
    reader = LatentReader(model)
    for step, deviation in enumerate(deviations):
        if step == saved_at:
            state, reader = reader.state(), LatentReader(model)
            reader.restore(state)
        x = torch.randn(samples, 4)
        reader.clear()
        outputs = model(x, torch.as_tensor(deviation).log())
        reader.watch(ForwardCall(outputs))
        loss = (outputs[0] - x).square().sum(1).mean() + divergence(*outputs[1:])
        loss.backward()
        found += reader.find(loss)
    return found, reader.is_over


@pytest.mark.parametrize("draw", [by_hand, by_torch])
@pytest.mark.parametrize("divergence", [summed, of_torch])
def test_a_latent_that_tells_nothing_is_reported_with_its_layer(draw, divergence):
    ((kind, layer, _, values),), is_over = seen([1.0] * (UNUSED_READS + 4), draw=draw, divergence=divergence)

    assert (kind, layer, is_over) == ("latent-unused", "head", False)
    assert values["dimensions"] == D
    assert values["nats"] < 0.05


def test_a_latent_that_tells_something_again_is_reported():
    found, _ = seen([1.0] * (UNUSED_READS + 2) + [0.5] * 3)

    assert [observation.kind for observation in found] == ["latent-unused", "latent-used"]
    assert found[1].values["nats"] == pytest.approx(D * 0.693, rel=0.05)


def test_one_dimension_that_tells_something_is_enough():
    assert seen([[1.0, 1.0, 0.5]] * 12)[0] == []


def test_a_restored_reader_goes_on():
    (observation,), _ = seen([1.0] * (UNUSED_READS + 2), saved_at=2)

    assert observation.kind == "latent-unused"


def test_a_sample_without_a_divergence_is_none():
    """The noise of an exploration, or the first layer of a flow, whose other half is a constant."""
    for divergence in (lambda mean, log_var: log_var.sum(1).mean(), lambda mean, log_var: torch.zeros(())):
        assert seen([1.0] * 12, divergence=divergence) == ([], True)


def test_few_samples_are_not_read():
    assert seen([1.0] * 12, samples=4) == ([], True)


def test_a_model_without_a_latent_is_read_a_few_times_only():
    model = nn.Linear(4, 2)
    reader = LatentReader(model)
    for _ in range(SEARCHED_STEPS):
        assert not reader.is_over
        reader.clear()
        output = model(torch.randn(B, 4))
        reader.watch(ForwardCall(output))
        output.sum().backward()
        assert not [*reader.find(output.sum())]

    assert reader.is_over
