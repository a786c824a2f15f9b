"""A policy gradient: one update per episode, from as many forward passes as the episode has actions."""

import torch
from torch import nn, optim
from torch.distributions import Categorical
from torch.nn import functional as F


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1, self.affine2 = nn.Linear(4, 16), nn.Linear(16, 2)
        self.saved_log_probs, self.rewards = [], []

    def forward(self, x):
        return F.softmax(self.affine2(F.relu(self.affine1(x))), dim=1)


def select_action(policy, state):
    m = Categorical(policy(state.unsqueeze(0)))
    action = m.sample()
    policy.saved_log_probs.append(m.log_prob(action))
    return action.item()


def finish_episode(policy, optimizer):
    R, returns = 0, []
    for r in policy.rewards[::-1]:
        R = r + 0.99 * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-8)
    policy_loss = [-p * R for p, R in zip(policy.saved_log_probs, returns, strict=True)]
    optimizer.zero_grad()
    policy_loss = torch.cat(policy_loss).sum()
    policy_loss.backward()
    optimizer.step()
    policy.rewards.clear()
    policy.saved_log_probs.clear()
    return policy_loss


def main(watch):
    torch.manual_seed(543)
    policy = Policy()
    optimizer = optim.Adam(policy.parameters(), lr=1e-2)
    losses = []
    with watch(policy, optimizer) as monitor:
        for _ in range(20):
            state, states = torch.randn(4), []
            for _ in range(10):
                states.append(state.unsqueeze(0))
                action = select_action(policy, state)
                policy.rewards.append(float((state[0] > 0) == action))
                state = 0.9 * state + 0.3 * torch.randn(4)
            loss = finish_episode(policy, optimizer)
            monitor.step(loss, batch=states)
            losses.append(loss.item())
    return losses
