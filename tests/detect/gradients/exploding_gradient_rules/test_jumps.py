"""Divisions by almost 0 are found in real trainings, clipped or not; losses that vary for other reasons are not."""

import pytest
import torch
from torch import nn

import gradwatch


def group_advantages(model, generator):
    """Rewards of 0 or 1 against the mean of all answers, over the deviation within a group, which may agree."""
    choice = torch.distributions.Categorical(logits=model(torch.randn(3, 6, generator=generator)))
    action = torch.multinomial(choice.probs.detach(), 8, replacement=True, generator=generator)
    rewards = (action == 0).float()
    advantage = (rewards - 0.2) / (rewards.std(1, keepdim=True) + 1e-8)
    return -(choice.log_prob(action.T).T * advantage).mean()


def scaled_windows(model, generator):
    """The future of a series, over the deviation of its past, which is 0 while a sensor stands still."""
    past, future = torch.randn(2, 4, 6, generator=generator)
    past[0] *= torch.rand(1, generator=generator) < 0.6
    center, scale = past.mean(1, keepdim=True), past.std(1, keepdim=True) + 1e-5
    return (model((past - center) / scale) - (future - center) / scale).abs().mean()


def balanced_classes(model, generator):
    """Classes weighted by one over their number in the batch, with labels smoothed over absent classes as well."""
    labels = torch.randint(0, 6, (16,), generator=generator)
    weight = 1 / (torch.bincount(labels, minlength=6) + 1e-7)
    logits = model(torch.randn(16, 6, generator=generator))
    return -(torch.log_softmax(logits, 1) * (0.9 * torch.eye(6)[labels] + 0.1 / 6) * weight).mean()


def regression(model, generator):
    """Prices in their own unit: large at every step."""
    x = torch.randn(8, 6, generator=generator)
    return ((model(x) - 2e5 * x.abs()) ** 2).mean()


def alternating_tasks(model, generator):
    """Two tasks in turn, one of them in thousands."""
    x = torch.randn(8, 6, generator=generator)
    is_first = torch.rand(1, generator=generator) < 0.5
    return (model(x) - x).abs().mean() * (2000.0 if is_first else 1.0)


def heavy_tails(model, generator):
    """Targets with a Cauchy distribution."""
    x = torch.randn(8, 6, generator=generator)
    noise = torch.tan(3.1415 * (torch.rand(8, 6, generator=generator) - 0.5))
    return (model(x) - noise).pow(2).mean()


def noise_levels(model, generator):
    """Denoising, weighted by one over the variance of the noise of the only sample."""
    sigma = 10 ** (-3 * torch.rand(1, generator=generator))
    x, noise = torch.randn(2, 1, 6, generator=generator)
    return ((model(x + sigma * noise) - x) ** 2 / sigma**2).mean()


def known_samples(model, generator):
    """Single samples of which the model knows some for sure, and gets others wrong."""
    x = torch.randn(1, 6, generator=generator)
    return torch.nn.functional.cross_entropy(30 * (model(x) + x), x.argmax(1))


def sparse_terms(model, generator):
    """A hinge that is 0 for most batches, in thousands."""
    x = torch.randn(1, 6, generator=generator)
    return torch.relu(x[0, 0] - 1) * 1e4 * model(x).pow(2).mean()


def around_zero(model, generator):
    """A policy gradient with advantages that sum to 0, so that the loss is rounding at a ratio of 1."""
    x = torch.randn(8, 6, generator=generator)
    logp = torch.log_softmax(model(x), 1)[:, 0]
    advantage = torch.tensor([1.0, -1.0]).repeat(4) * 2e3 * torch.rand(1, generator=generator)
    return (torch.exp(logp - logp.detach()) * advantage).mean()


def found_in(loss_of, *, clips):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(4)
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for _ in range(160):
            loss = loss_of(model, generator)
            optimizer.zero_grad()
            loss.backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            monitor.step(loss)
        return [f for f in monitor.findings() if any(q.key == "size.jumps" for q in f.evidence)]


@pytest.mark.parametrize("clips", [True, False], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("loss_of", [group_advantages, scaled_windows, balanced_classes])
def test_a_division_by_almost_nothing_is_found(loss_of, clips):
    (finding,) = found_in(loss_of, clips=clips)

    assert (finding.kind, finding.severity.name) == ("exploding-gradient", "WARNING")
    assert finding.onset <= 20


@pytest.mark.parametrize("clips", [True, False], ids=["clipped", "not clipped"])
@pytest.mark.parametrize(
    "loss_of", [regression, alternating_tasks, heavy_tails, noise_levels, known_samples, sparse_terms, around_zero]
)
def test_losses_that_vary_otherwise_are_no_division(loss_of, clips):
    assert found_in(loss_of, clips=clips) == []
