"""The sign of a policy's entropy is read from the graph of its loss; other products of probabilities are not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical

from gradwatch.probe.graph.reader import LossGraphReader
from gradwatch.probe.parameters import list_parameters

GENERATOR = torch.Generator().manual_seed(0)
X, OTHER_X = torch.randn(2, 12, 6, generator=GENERATOR)
CHOICES, ADVANTAGES = torch.arange(12) % 4, torch.randn(12, generator=GENERATOR)
TEACHER = torch.randn(12, 4, generator=GENERATOR)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.policy, self.value = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 1)
        self.log_alpha = nn.Parameter(torch.zeros(()))

    def forward(self, x=X):
        return self.policy(torch.tanh(self.trunk(x)))


def actor_critic(agent, sign):
    choice = Categorical(logits=agent())
    value_loss = agent.value(torch.tanh(agent.trunk(X))).square().mean()
    loss = -(choice.log_prob(CHOICES) * ADVANTAGES).mean() + 0.5 * value_loss
    return loss + signed(0.1 * choice.entropy().mean(), sign)


def clipped_ratio(agent, sign):
    logits = agent()
    logp_all = F.log_softmax(logits, -1)
    logp = logp_all.gather(1, CHOICES[:, None]).squeeze(1)
    ratio = (logp - logp.detach()).exp()
    gain = torch.min(ratio * ADVANTAGES, ratio.clamp(0.8, 1.2) * ADVANTAGES)
    negative_entropy = (F.softmax(logits, -1) * logp_all).sum(-1)
    return (-gain - (sign * 0.01) * negative_entropy).mean() if sign > 0 else (-gain + 0.01 * negative_entropy).mean()


def by_probabilities(agent, sign):
    p = agent().softmax(-1)
    entropy = -(p * (p + 1e-8).log()).sum(-1).mean()
    loss = -(p[torch.arange(12), CHOICES].log() * ADVANTAGES).sum() / 12
    return (loss + 0.01 * entropy if sign > 0 else loss - entropy / 100) / 2


def of_distribution(agent, sign):
    choice = Categorical(probs=agent().softmax(-1))
    loss = (F.nll_loss(choice.probs.log(), CHOICES, reduction="none") * ADVANTAGES).mean()
    return loss + choice.entropy().mean() if sign > 0 else loss - choice.entropy().mean()


def signed(term, sign):
    return term if sign > 0 else -term


def own_exponential(agent, sign):
    logp = agent().log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return (signed(entropy, sign) * 0.1 - logp[torch.arange(12), CHOICES] * ADVANTAGES).mean()


POLICIES = [actor_critic, clipped_ratio, by_probabilities, of_distribution, own_exponential]


def adapted(agent):
    """Entropy minimization at test time."""
    return Categorical(logits=agent()).entropy().mean()


def unlabeled(agent):
    """Weighted cross entropy of labeled samples, and the entropy of others."""
    logp = agent().log_softmax(-1)
    labeled = -(logp[torch.arange(12), CHOICES] * ADVANTAGES.abs()).mean()
    return labeled + Categorical(logits=agent(OTHER_X)).entropy().mean()


def classified(agent):
    logits = agent()
    return F.cross_entropy(logits, CHOICES) + 0.1 * Categorical(logits=logits).entropy().mean()


def distilled(agent):
    logits = agent()
    p, logp = logits.softmax(-1), logits.log_softmax(-1)
    divergence = (p * (logp - TEACHER.log_softmax(-1))).sum(-1).mean()
    return divergence - (logp.gather(1, CHOICES[:, None]).squeeze(1) * ADVANTAGES).mean()


def soft_values(agent):
    """A discrete soft actor-critic."""
    logits = agent()
    return (logits.softmax(-1) * (0.2 * logits.log_softmax(-1) - TEACHER)).sum(-1).mean()


def learned_factor(agent):
    """The sign of a factor with a gradient is unknown."""
    choice = Categorical(logits=agent())
    loss = -(choice.log_prob(CHOICES) * ADVANTAGES).mean()
    return loss + (agent.log_alpha * choice.entropy()).mean()


def found(loss_of, *args):
    torch.manual_seed(0)
    agent = Agent()
    reader = LossGraphReader(agent, *list_parameters(agent))
    loss = loss_of(agent, *args)
    loss.backward()
    return [event.layer for event in reader.read(loss, step=0) if event.kind == "graph-entropy-minimized"]


@pytest.mark.parametrize("loss_of", POLICIES)
def test_an_entropy_that_the_loss_adds_is_found_at_its_policy(loss_of):
    assert found(loss_of, 1) == ["policy"]


@pytest.mark.parametrize("loss_of", POLICIES)
def test_an_entropy_that_the_loss_subtracts_is_right(loss_of):
    assert found(loss_of, -1) == []


@pytest.mark.parametrize("loss_of", [adapted, unlabeled, classified, distilled, soft_values, learned_factor])
def test_other_uses_of_entropy_are_no_mistake(loss_of):
    assert found(loss_of) == []
