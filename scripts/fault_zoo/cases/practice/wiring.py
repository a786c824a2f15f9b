"""Layers that get no gradient, or not the one that they need."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.practice.processes import PolesOnCarts
from scripts.fault_zoo.cases.reports.material import accuracy, digits, indices
from scripts.fault_zoo.protocol import Attach, case

# ---------------------------------------------------------------------------------------------- codes that are rounded


class Compressor(nn.Module):
    """Squeeze a digit into eight small integers and draw it again."""

    def __init__(self, *, passes_gradient: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))
        self.passes_gradient = passes_gradient

    def forward(self, x: Tensor) -> Tensor:
        code = 3 * torch.tanh(self.encoder(x))
        rounded = code.round()
        if self.passes_gradient:
            rounded = code + (rounded - code).detach()
        return self.decoder(rounded)


def train_compressor(attach: Attach, *, repaired: bool) -> float:
    """Return the squared error on test digits, as a fraction of their variance."""
    torch.manual_seed(0)
    x, _, test_x, _ = digits()
    model = Compressor(passes_gradient=repaired)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    chosen = indices(len(x), 64)
    for _ in range(300):
        i = next(chosen)
        loss = F.mse_loss(model(x[i]), x[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        return (F.mse_loss(model(test_x), test_x) / (test_x - test_x.mean(0)).square().mean()).item()


@case(
    fault="no-gradient",
    also=("dead-layer",),
    layers=("encoder",),
    onset=0,
    source="https://github.com/Justin-Tan/generative-compression/issues/27",
    tags=("autoencoder", "quantization", "digits"),
)
def codes_rounded_without_gradient(attach: Attach) -> None:
    """The codes of an autoencoder are rounded, and rounding has a gradient of zero: the encoder stays as it was
    initialized. Reported in https://github.com/Justin-Tan/generative-compression/issues/27.
    """
    train_compressor(attach, repaired=False)


# -------------------------------------------------------------------------------------------- a ratio that is detached


class ActorCritic(nn.Module):
    """Two small networks: which way to push the cart, and how good its state is."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))


def play(model: ActorCritic, world: PolesOnCarts, steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Return states, actions, their logarithmic probabilities, returns, and the steps per fall."""
    states, actions, old, fallen = [], [], [], []
    with torch.no_grad():
        for _ in range(steps):
            states.append(world.state)
            policy = model.actor(world.state).log_softmax(1)
            actions.append(policy.exp().multinomial(1).squeeze(1))
            old.append(policy.gather(1, actions[-1][:, None]).squeeze(1))
            fallen.append(world.push(actions[-1]).float())
        ahead, returns = model.critic(world.state).squeeze(1), []
        for fell in reversed(fallen):
            ahead = 0.1 + 0.97 * ahead * (1 - fell)
            returns.append(ahead)
    life = steps * len(fallen[0]) / max(1.0, sum(fell.sum().item() for fell in fallen))
    return torch.cat(states), torch.cat(actions), torch.cat(old), torch.cat(returns[::-1]), life


def train_balance(attach: Attach, *, repaired: bool) -> float:
    """Return the steps per fall at the end."""
    torch.manual_seed(0)
    world, model = PolesOnCarts(16), ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = attach(model, optimizer)
    life = 0.0
    for _ in range(32):
        states, actions, old, returns, life = play(model, world, 48)
        for _ in range(2):
            for i in torch.randperm(len(states)).chunk(4):
                value = model.critic(states[i]).squeeze(1)
                gain = returns[i] - value.detach()
                gain = (gain - gain.mean()) / gain.std()
                new = model.actor(states[i]).log_softmax(1).gather(1, actions[i, None]).squeeze(1)
                ratio = (new - old[i]).exp()
                if not repaired:
                    ratio = ratio.detach()
                bounded = ratio.clamp(0.8, 1.2)
                loss = 0.5 * F.mse_loss(value, returns[i]) - torch.minimum(ratio * gain, bounded * gain).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                monitor.step(loss, batch=states[i])
    return life


@case(
    fault="no-gradient",
    also=("not-optimized", "dead-layer"),
    layers=("actor",),
    onset=0,
    source="https://github.com/seungeunrho/minimalRL/issues/33",
    tags=("rl", "ppo"),
)
def ratio_detached(attach: Attach) -> None:
    """In proximal policy optimization the ratio of the probabilities is detached. The critic learns, and no gradient
    reaches the actor. Proposed in https://github.com/seungeunrho/minimalRL/issues/33.
    """
    train_balance(attach, repaired=False)


@case(source="the repaired twin of `ratio_detached`: the ratio keeps its graph", tags=("rl", "ppo"))
def ratio_with_its_graph(attach: Attach) -> None:
    """Proximal policy optimization: the better the policy, the longer the returns, and the loss goes up."""
    assert train_balance(attach, repaired=True) > 60


# ------------------------------------------------------------------------------------- centers outside the optimizer


class CenteredDigits(nn.Module):
    """A classifier with two features, and a center for each class in their plane."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        self.head = nn.Linear(2, 10)
        self.centers = nn.Embedding(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def train_centers(attach: Attach, *, repaired: bool) -> float:
    """Return the accuracy on test digits."""
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    model = CenteredDigits()
    learned = [*model.features.parameters(), *model.head.parameters()]
    if repaired:
        learned += model.centers.parameters()
    optimizer = torch.optim.Adam(learned, lr=5e-3)
    monitor = attach(model, optimizer)
    chosen = indices(len(x), 64)
    for _ in range(400):
        i = next(chosen)
        features = model.features(x[i])
        distance = (features - model.centers(y[i])).square().sum(1).mean()
        loss = F.cross_entropy(model.head(features), y[i]) + 0.5 * distance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    return accuracy(model, test_x, test_y)


@case(
    fault="not-optimized",
    layers=("centers",),
    onset=0,
    tolerate=("missing-zero-grad",),
    source="https://github.com/KaiyangZhou/pytorch-center-loss/issues/22",
    tags=("metric-learning", "digits"),
)
def centers_outside_the_optimizer(attach: Attach) -> None:
    """The centers of a center loss are parameters, and the optimizer does not have them: the classes are drawn to
    random places that overlap. Reported in https://github.com/KaiyangZhou/pytorch-center-loss/issues/22.
    """
    train_centers(attach, repaired=False)


@case(source="the repaired twin of `centers_outside_the_optimizer`: it has them", tags=("metric-learning", "digits"))
def centers_in_the_optimizer(attach: Attach) -> None:
    """Classes are drawn to centers that are learned with the network, in a plane."""
    assert train_centers(attach, repaired=True) > 0.78
