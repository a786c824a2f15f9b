"""Reinforcement learning: rewards of groups, clipping, entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from scripts.fault_zoo.cases.published.data import setup
from scripts.fault_zoo.protocol import Attach, case


class Answerer(nn.Module):
    """Three tokens in answer to a question."""

    def __init__(self, questions: int = 8, tokens: int = 6, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(questions + tokens, width)
        self.cell, self.head = nn.GRUCell(width, width), nn.Linear(width, tokens)
        self.questions = questions

    def rollout(self, question: Tensor, answer: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(tokens, their log-probabilities); the tokens are drawn unless they are given."""
        h = torch.zeros(len(question), self.cell.hidden_size)
        last, tokens, logps = question, [], []
        for i in range(2):
            h = self.cell(self.embed(last), h)
            choice = Categorical(logits=self.head(h))
            token = choice.sample() if answer is None else answer[:, i]
            tokens.append(token)
            logps.append(choice.log_prob(token))
            last = token + self.questions
        return torch.stack(tokens, 1), torch.stack(logps, 1)


def leave_one_out(rewards: Tensor) -> Tensor:
    """Every answer against the mean of the other answers to its question, in units of their deviation."""
    n = rewards.shape[1]
    others = rewards[:, None, :].expand(-1, n, -1)[:, ~torch.eye(n, dtype=torch.bool)].view(len(rewards), n, n - 1)
    return (rewards - others.mean(-1)) / (others.std(-1) + 1e-6)


def of_the_group(rewards: Tensor) -> Tensor:
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)


def _grouped(attach: Attach, advantage: Callable[..., Any]) -> None:
    setup(541)
    model = Answerer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(541)
    right = torch.randint(0, 6, (8, 2), generator=generator)
    monitor = attach(model, optimizer)
    for _step in range(300):
        question = torch.randint(0, 8, (6,), generator=generator).repeat_interleave(4)
        with torch.no_grad():
            answer, old = model.rollout(question)
        rewards = (answer == right[question]).all(1).float().view(6, 4)
        advantages = advantage(rewards).flatten()
        _, logp = model.rollout(question, answer)
        ratio = torch.exp(logp - old)
        loss = -torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.step(loss, batch=question)


@case(
    fault="exploding-gradient",
    onset=0,
    also=("gradient-spike", "oscillating-gradient"),
    source=(
        "NVIDIA-NeMo/RL#1518: the other answers of a group have equal rewards, their deviation is 0, and advantages "
        "are +-1,000,000"
    ),
)
def leave_one_out_advantages(attach: Attach) -> None:
    """Four answers per question, rewarded with 0 or 1, each compared with the other three and divided by their
    deviation.
    """
    _grouped(attach, leave_one_out)


@case(
    fault=None,
    tolerate=("loss-plateau", "no-gradient", "dead-layer"),
    source="NVIDIA-NeMo/RL#1518: the deviation of the whole group, as without the leave-one-out baseline",
)
def leave_one_out_advantages_fixed(attach: Attach) -> None:
    """The same with mean and deviation of the whole group."""
    _grouped(attach, of_the_group)


class ReplyAgent(nn.Module):
    def __init__(self, prompts: int = 16, replies: int = 12, width: int = 48) -> None:
        super().__init__()
        self.actor = nn.Sequential(
            nn.Linear(prompts, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, replies)
        )
        self.critic = nn.Sequential(nn.Linear(prompts, width), nn.Tanh(), nn.Linear(width, 1))


def _entropy(attach: Attach, sign: float) -> None:
    setup(543)
    agent = ReplyAgent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(543)
    worth = torch.rand(16, 12, generator=generator)
    monitor = attach(agent, optimizer)
    for _update in range(400):
        prompt = torch.randint(0, 16, (32,), generator=generator)
        x = F.one_hot(prompt, 16).float()
        choice = Categorical(logits=agent.actor(x))
        reply = choice.sample()
        reward = worth[prompt, reply] + 0.6 * torch.randn(32, generator=generator)
        value = agent.critic(x).squeeze(1)
        pi_loss = -(choice.log_prob(reply) * (reward - value.detach())).mean()
        loss = pi_loss + sign * 0.1 * choice.entropy().mean() + 0.5 * F.mse_loss(value, reward)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)


@case(
    fault="saturated-activation",
    layers=("actor",),
    onset=100,
    also=("vanishing-gradient", "dead-layer", "loss-plateau"),
    tolerate=("layer-imbalance",),
    tags=("mid-run", "subtle"),
    source=(
        "PKU-Alignment/omnisafe#133, nebuly-ai/optimate#250: the entropy is added to the loss, so the policy minimises"
        " it"
    ),
)
def reply_entropy(attach: Attach) -> None:
    """An actor and a critic for replies to prompts, rewarded with much noise, and an entropy term in the loss."""
    _entropy(attach, sign=1.0)


@case(fault=None, source="PKU-Alignment/omnisafe#133, after the change")
def reply_entropy_fixed(attach: Attach) -> None:
    """The same with the entropy subtracted."""
    _entropy(attach, sign=-1.0)
