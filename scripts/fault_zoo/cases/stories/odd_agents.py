"""An agent whose loss rises because it plays for longer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.protocol import Attach, case


class Poles:
    """Carts with poles to balance (Barto et al. 1983), 16 at a time. A game is over when a pole falls."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.state = self.fresh()
        self.age = torch.zeros(16)

    def fresh(self) -> Tensor:
        return 0.1 * torch.rand(16, 4, generator=self.generator) - 0.05

    def step(self, push: Tensor) -> tuple[Tensor, Tensor]:
        """Push right (1) or left (0), and return which games are over and how long these were."""
        _, speed, angle, turn = self.state.unbind(1)
        force = 20.0 * push - 10
        sine, cosine = angle.sin(), angle.cos()
        pull = (force + 0.05 * turn**2 * sine) / 1.1
        bend = (9.8 * sine - cosine * pull) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        drive = pull - 0.05 * bend * cosine / 1.1
        change = torch.stack([speed, drive, turn, bend], 1)
        self.state = self.state + 0.02 * change
        self.age += 1
        over = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.21) | (self.age >= 500)
        ages = self.age[over]
        self.state = torch.where(over[:, None], self.fresh(), self.state)
        self.age = torch.where(over, 0.0, self.age)
        return over.float(), ages


@case(source="https://github.com/werner-duvaud/muzero-general/issues/96", tags=("actor-critic", "rl", "odd"))
def loss_that_rises_with_the_reward(attach: Attach) -> None:
    """An actor and a critic learn to balance poles. The games last longer and longer, and the loss rises, because the
    value that is lost in a fall grows. The answer was that losses need not fall in reinforcement learning.
    """
    torch.manual_seed(591)
    poles = Poles(torch.Generator().manual_seed(1))
    model = nn.ModuleDict(
        {
            "actor": nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2)),
            "critic": nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1)),
        }
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer)
    losses: list[float] = []
    ages: list[float] = []
    for _ in range(700):
        states, pushes, ends = [], [], []
        for _ in range(8):
            states.append(poles.state)
            with torch.no_grad():
                pushes.append(torch.distributions.Categorical(logits=model["actor"](poles.state)).sample())
            over, finished = poles.step(pushes[-1])
            ends.append(over)
            ages += finished.tolist()
        with torch.no_grad():
            value = model["critic"](poles.state).squeeze(1)
        returns: list[Tensor] = []
        for over in reversed(ends):
            value = 1 + 0.99 * value * (1 - over)
            returns.insert(0, value)
        seen, wanted = torch.cat(states), torch.cat(returns)
        found = model["critic"](seen).squeeze(1)
        policy = torch.distributions.Categorical(logits=model["actor"](seen))
        gain = (wanted - found).detach()
        gain = (gain - gain.mean()) / (gain.std() + 1e-6)
        error = F.mse_loss(found, wanted)
        loss = 0.5 * error - (policy.log_prob(torch.cat(pushes)) * gain).mean() - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.step(loss)
        losses.append(loss.item())
        if sum(ages[-60:]) > 60 * 120:
            break
    means = [sum(losses[k : k + 50]) / 50 for k in range(0, len(losses) - 50, 50)]
    assert sum(ages[:60]) < 60 * 30
    assert sum(ages[-60:]) > 60 * 100
    assert max(means) > 1.3 * means[0], means
