"""The policy of a policy gradient is read from the loss, however the loss is written, and nothing else is touched."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F

import gradwatch

SCHEDULE = gradwatch.Schedule(budget=0)  # samples do not become rarer
ACTIONS, SAMPLES, SHIFT = 5, 32, 0.5
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
TAKEN = torch.arange(SAMPLES) % ACTIONS
ADVANTAGE = torch.linspace(-1.0, 2.0, SAMPLES)


def log_prob_by_categorical(logits):
    return Categorical(logits=logits).log_prob(TAKEN)


def log_prob_by_probabilities(logits):
    return Categorical(probs=logits.softmax(-1)).log_prob(TAKEN)


def log_prob_by_log_softmax(logits):
    return logits.log_softmax(-1).gather(1, TAKEN[:, None])[:, 0]


def log_prob_by_index(logits):
    return logits.softmax(-1)[torch.arange(SAMPLES), TAKEN].log()


def log_prob_by_cross_entropy(logits):
    return -F.cross_entropy(logits, TAKEN, reduction="none")


def weighed(logits):
    """Return the loss of REINFORCE."""
    return -(log_prob_by_categorical(logits) * ADVANTAGE).mean()


FORMS = (
    log_prob_by_categorical,
    log_prob_by_probabilities,
    log_prob_by_log_softmax,
    log_prob_by_index,
    log_prob_by_cross_entropy,
)


def train(loss_of, steps=31, *, is_watched=True, before_close=None):
    """Return the history of some steps of a policy, its losses, and the entropy that it had at each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, ACTIONS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = gradwatch.watch(model, optimizer, on_finding=None, schedule=SCHEDULE) if is_watched else None
    losses, entropies = [], []
    for _ in range(steps):
        logits = model(X)
        loss = loss_of(logits)
        entropies.append(float(Categorical(logits=logits.detach()).entropy().mean()) / math.log(ACTIONS))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if monitor:
            monitor.step(loss)
    if before_close:
        before_close()
    if monitor:
        monitor.close()
    return monitor and monitor.history, losses, entropies


def last(history, name):
    """Return the newest reading, or nan."""
    values = history[f"policy.{name}"]
    return float(values[~torch.tensor(values).isnan().numpy()][-1]) if (values == values).any() else math.nan


@pytest.mark.parametrize("log_prob", FORMS)
def test_the_entropy_of_a_policy_is_read_from_any_form_of_its_loss(log_prob):
    history, _, entropies = train(lambda logits: -(log_prob(logits) * ADVANTAGE).mean())

    # the reading of step 30 belongs to a step since the sample before
    assert min(abs(last(history, "entropy") - e) for e in entropies[21:]) < 1e-5
    assert math.isnan(last(history, "divergence")), "there is no ratio"


def test_divergence_and_clipped_share_follow_from_the_ratio():
    def ppo(logits):
        # half of the samples have a ratio of 1, the others one of exp(0.5)
        log_prob = log_prob_by_categorical(logits)
        ratio = (log_prob - (log_prob.detach() - SHIFT * (torch.arange(SAMPLES) % 2))).exp()
        return -torch.min(ratio * ADVANTAGE, ratio.clamp(0.8, 1.2) * ADVANTAGE).mean()

    history, _, _ = train(ppo)

    assert last(history, "divergence") == pytest.approx((math.exp(SHIFT) - 1 - SHIFT) / 2, rel=1e-4)
    assert last(history, "clipped_frac") == 0.5


def test_a_penalty_against_a_reference_is_no_ratio():
    def loss(logits):
        log_prob = log_prob_by_categorical(logits)
        reference = log_prob.detach() - SHIFT - log_prob
        return -(log_prob * ADVANTAGE).mean() + (reference.exp() - reference - 1).mean()

    assert math.isnan(last(train(loss)[0], "divergence"))


def test_weights_of_one_sign_are_those_of_a_classification():
    history, _, _ = train(lambda logits: -(log_prob_by_categorical(logits) * (ADVANTAGE + 1.5)).mean())

    assert math.isnan(last(history, "entropy"))


@pytest.mark.parametrize("is_policy", [True, False])
def test_only_a_policy_gradient_replaces_a_function_of_torch_until_the_monitor_closes(is_policy):
    before, during = torch.autograd.backward, []

    train(
        weighed if is_policy else lambda logits: F.cross_entropy(logits, TAKEN),
        steps=2,
        before_close=lambda: during.append(torch.autograd.backward),
    )

    assert (during[0] is not before) == is_policy
    assert torch.autograd.backward is before


def test_reading_changes_no_loss():
    assert train(weighed)[1] == train(weighed, is_watched=False)[1]


def test_the_ratio_of_continuous_actions_is_read_where_it_is_clipped():
    actions = torch.linspace(-1.0, 1.0, SAMPLES)[:, None].expand(-1, ACTIONS)

    def ppo(means):
        log_prob = torch.distributions.Normal(means, 0.5).log_prob(actions).sum(-1)
        ratio = (log_prob - (log_prob.detach() - SHIFT)).exp()
        return -torch.min(ratio * ADVANTAGE, ratio.clamp(0.8, 1.2) * ADVANTAGE).mean()

    history, _, _ = train(ppo, steps=21)

    assert last(history, "divergence") == pytest.approx(math.exp(SHIFT) - 1 - SHIFT, rel=1e-4)
    assert last(history, "clipped_frac") == 1.0
    assert math.isnan(last(history, "entropy"))
