"""A policy that becomes certain because its loss adds its entropy is found; one that has learned is not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical

import gradwatch


class Shared(nn.Module):
    """Policy and value over one trunk."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
        self.policy, self.value = nn.Linear(32, 5), nn.Linear(32, 1)

    def forward(self, x):
        hidden = self.trunk(x)
        return self.policy(hidden), self.value(hidden).squeeze(1)


class Alone(nn.Module):
    """A policy without a critic."""

    def __init__(self):
        super().__init__()
        self.trunk, self.policy = nn.Sequential(nn.Linear(8, 32), nn.Tanh()), nn.Linear(32, 5)

    def forward(self, x):
        return self.policy(self.trunk(x)), torch.zeros(len(x))


def reinforce(logits, action, advantage):
    choice = Categorical(logits=logits)
    return -(choice.log_prob(action) * advantage).mean(), choice.entropy().mean()


def clipped(logits, action, advantage):
    logp_all = logits.log_softmax(-1)
    logp = logp_all.gather(1, action[:, None]).squeeze(1)
    ratio = (logp - logp.detach()).exp()
    loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    return loss, -(logits.softmax(-1) * logp_all).sum(-1).mean()


def found_in(model_class, loss_of, combine):
    torch.manual_seed(5)
    model = model_class()
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    worth = torch.rand(8, 5)
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for _ in range(300):
            state = torch.randint(0, 8, (32,))
            logits, value = model(F.one_hot(state, 8).float())
            action = Categorical(logits=logits.detach()).sample()
            reward = worth[state, action] + 0.5 * torch.randn(32)
            baseline = value.detach() if value.requires_grad else reward.mean()
            loss, entropy = loss_of(logits, action, reward - baseline)
            loss = combine(loss, entropy)
            if value.requires_grad:
                loss = loss + 0.5 * F.mse_loss(value, reward)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
        return [f for f in monitor.findings() if any(q.key == "policy.fall" for q in f.evidence)]


@pytest.mark.parametrize(
    ("model_class", "loss_of"), [(Shared, reinforce), (Shared, clipped), (Alone, clipped)], ids=["a", "b", "c"]
)
def test_a_policy_whose_entropy_is_minimized_is_found(model_class, loss_of):
    (finding,) = found_in(model_class, loss_of, lambda loss, entropy: loss + 0.1 * entropy)

    assert (finding.kind, finding.layer) == ("saturated-activation", "policy")
    assert finding.severity.name == "WARNING"


@pytest.mark.parametrize(("model_class", "loss_of"), [(Shared, reinforce), (Alone, clipped)], ids=["shared", "alone"])
@pytest.mark.parametrize(
    "combine",
    [
        pytest.param(lambda loss, entropy: loss - 0.1 * entropy, id="subtracted"),
        pytest.param(lambda loss, entropy: loss - 1e-4 * entropy, id="hardly subtracted"),
        pytest.param(lambda loss, entropy: loss + -0.1 * entropy, id="added with a negative factor"),
    ],
)
def test_a_policy_with_an_entropy_bonus_is_right(model_class, loss_of, combine):
    assert found_in(model_class, loss_of, combine) == []
