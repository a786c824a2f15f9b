"""Agents: a target that is a copy of itself, and a school that goes by the last mark."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ a target of itself


class TwoStepGame:
    """The first move of the first agent chooses one of two games (Rashid et al. 2018). Two agents, two moves each."""

    first = torch.full((2, 2), 7.0)
    second = torch.tensor([[0.0, 1.0], [1.0, 8.0]])

    @staticmethod
    def play(state: Tensor, moves: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rewards, the next states and which games are over. State 0 is the choice, 1 and 2 are the games."""
        pay = torch.where(
            state == 1, TwoStepGame.first[moves[:, 0], moves[:, 1]], TwoStepGame.second[moves[:, 0], moves[:, 1]]
        )
        over = state > 0
        return torch.where(over, pay, 0.0), torch.where(over, state, 1 + moves[:, 0]), over.float()


class MixedValues(nn.Module):
    """Values of the moves of two agents, and a monotone mix of them that depends on the state."""

    def __init__(self) -> None:
        super().__init__()
        self.agents = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 2))
        self.inner, self.inner_bias = nn.Linear(3, 16), nn.Linear(3, 8)
        self.outer = nn.Linear(3, 8)
        self.bias = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))

    def values(self, state: Tensor) -> Tensor:
        """Return the values of each agent's moves, (batch, agents, moves)."""
        seen = F.one_hot(state, 3).float()
        agent = torch.eye(2).expand(len(state), 2, 2)
        return self.agents(torch.cat([seen[:, None].expand(-1, 2, -1), agent], 2))

    def mix(self, chosen: Tensor, state: Tensor) -> Tensor:
        """Return the common value of the values that were chosen, (batch, agents)."""
        seen = F.one_hot(state, 3).float()
        weights = self.inner(seen).abs().unflatten(1, (2, 8))
        hidden = F.elu((chosen[:, :, None] * weights).sum(1) + self.inner_bias(seen))
        return (hidden * self.outer(seen).abs()).sum(1) + self.bias(seen).squeeze(1)


class Mixer(nn.Module):
    """The values that are learned, and their target."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = MixedValues(), MixedValues()
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)


def train_team(attach: Attach, *, from_online: bool) -> float:
    """Return what the team earns with its best moves."""
    torch.manual_seed(401)
    generator = torch.Generator().manual_seed(16)
    model = Mixer()
    optimizer = torch.optim.Adam(model.online.parameters(), lr=5e-3)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    for step in range(400):
        state = torch.randint(0, 3, (64,), generator=generator)
        moves = torch.randint(0, 2, (64, 2), generator=generator)
        reward, after, over = TwoStepGame.play(state, moves)
        chosen = model.online.values(state).gather(2, moves[:, :, None]).squeeze(2)
        best = model.target.mix(model.target.values(after).amax(2), after)
        loss = F.mse_loss(model.online.mix(chosen, state), reward + 0.99 * (1 - over) * best)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            source = model.online if from_online else model.target
            model.target.load_state_dict(source.state_dict())
        monitor.step(loss, batch=state)
    state, earned = torch.tensor([0]), 0.0
    for _ in range(2):
        moves = model.online.values(state).argmax(2)
        reward, state, _ = TwoStepGame.play(state, moves)
        earned += reward.item()
    return earned


@case(
    fault="not-optimized",
    also=("loss-plateau",),
    layers=("target",),
    onset=19,
    source="https://github.com/thesouther/MARL/issues/8",
    tags=("q-learning", "target"),
)
def target_of_itself(attach: Attach) -> None:
    """The target is copied from itself, and stays as it was at the start. What follows the first move is never known:
    the first move has a random value. The team earns 7, and 8 in the twin.
    """
    train_team(attach, from_online=False)


@case(source="the repaired twin of `target_of_itself`", tags=("q-learning", "target", "twin"))
def target_of_the_team(attach: Attach) -> None:
    """The target is copied from the values that are learned."""
    assert train_team(attach, from_online=True) == 8.0


# ------------------------------------------------------------------------------------ a school by the last mark


class Folder(nn.Module):
    """Choose one of six positions for each bond of a molecule, given what is near the bond."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 6))

    def forward(self, bonds: Tensor) -> Tensor:
        return self.net(bonds)


def molecules(level: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the bonds of 16 molecules of a level, (16, bonds, 12), and their best positions."""
    bonds = 2 + 2 * level
    near = torch.randint(0, 2 + level, (16, bonds), generator=generator)
    noise = 0.3 * torch.randn(16, bonds, 12, generator=generator)
    return F.one_hot(near, 12) + noise, near * 5 % 6


def train_school(attach: Attach) -> tuple[list[float], float]:
    """Return the mean mark over 20 batches at each promotion, and the share of right positions at the end."""
    torch.manual_seed(402)
    generator = torch.Generator().manual_seed(17)
    model = Folder()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = attach(model, optimizer)
    level, marks, promoted, last = 0, [], [], 0.0
    for _ in range(400):
        bonds, best = molecules(level, generator)
        policy = torch.distributions.Categorical(logits=model(bonds))
        chosen = policy.sample()
        reward = (chosen == best).float().mean(1)
        advantage = reward - reward.mean()
        loss = -(advantage[:, None] * policy.log_prob(chosen)).mean() - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=bonds)
        marks.append(reward.mean().item())
        last = reward[-1].item()
        if last >= 0.75 and level < 5:
            level += 1
            recent = marks[-20:]
            promoted.append(sum(recent) / len(recent))
    bonds, best = molecules(5, generator)
    return promoted, (model(bonds).argmax(2) == best).float().mean().item()


@case(
    fault="loss-plateau",
    onset=10,
    source="https://github.com/ZimmermanGroup/conformer-rl/issues/63",
    tags=("policy-gradient", "curriculum"),
)
def school_by_the_last_mark(attach: Attach) -> None:
    """The level rises if the last mark is at least 0.75; it should be the average of the last marks. One lucky molecule
    of two bonds is enough: the average is 0.16 at the first promotion. The agent still learns. No kind fits.
    """
    train_school(attach)
