"""A penalty along one axis, a wave that is zero, a variance of the outputs, and an entropy that is squared."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ a penalty along one axis


@case(
    fault="exploding-gradient",
    also=("learning-rate-too-high", "gradient-spike", "oscillating-gradient", "loss-plateau"),
    tolerate=("layer-imbalance", "rising-sparsity"),
    onset=0,
    source="https://github.com/Zeleni9/pytorch-wgan/issues/40",
    tags=("gan", "penalty"),
)
def penalty_along_one_axis(attach: Attach) -> None:
    """The slope of a critic is to be 1 for each picture. The norm is taken along the axis of the channels, of which
    there is one, so that the slope is to be 1 for each pixel, and 8 for a picture of 64 of them.
    """
    torch.manual_seed(751)
    x, _, _, _ = digits()
    real = 2 * x - 1
    generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh(), nn.Unflatten(1, (1, 8, 8)))
    critic = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(512, 1),
    )
    model = nn.ModuleDict({"generator": generator, "critic": critic})
    forging = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    judging = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    monitor = attach(model, [forging, judging])
    for step, i in enumerate(draws(len(real), size=32, steps=400)):
        forged = generator(torch.randn(32, 16))
        share = torch.rand(32, 1, 1, 1)
        between = (share * real[i] + (1 - share) * forged.detach()).requires_grad_()
        (slopes,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = ((slopes.norm(2, dim=1) - 1) ** 2).mean()
        loss = critic(forged.detach()).mean() - critic(real[i]).mean() + 10 * penalty
        judging.zero_grad()
        loss.backward()
        judging.step()
        if step % 5 == 4:
            forging.zero_grad()
            (-critic(forged).mean()).backward()
            forging.step()
        monitor.step(loss, batch=real[i])


# ------------------------------------------------------------------------------------ a wave that is zero


def solve_well(attach: Attach, *, normalizes: bool) -> float:
    """Return the largest value of the wave; the right one has 1.41."""
    torch.manual_seed(752)
    energy = torch.pi**2 / 2
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer)
    walls = torch.tensor([[0.0], [1.0]])
    for _ in range(600):
        place = torch.rand(64, 1, requires_grad=True)
        wave = model(place)
        (slope,) = torch.autograd.grad(wave.sum(), place, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), place, create_graph=True)
        loss = (bend / 2 + energy * wave).square().mean() + 10 * model(walls).square().sum()
        if normalizes:
            loss = loss + 10 * (model(torch.linspace(0, 1, 65)[:, None]).square().mean() - 1).square()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=place)
    with torch.no_grad():
        return model(torch.linspace(0, 1, 65)[:, None]).abs().max().item()


@case(
    fault="loss-plateau",
    also=("vanishing-gradient", "dead-layer"),
    onset=0,
    source="https://github.com/lululxvi/deepxde/issues/356",
    tags=("physics", "loss"),
)
def wave_that_is_zero(attach: Attach) -> None:
    """A network is to solve Schroedinger's equation in a well, at whose walls the wave is zero. Zero everywhere is a
    solution, too, and the network finds this one.
    """
    solve_well(attach, normalizes=False)


@case(source="the repaired twin of `wave_that_is_zero`", tags=("physics", "loss", "twin"))
def wave_that_is_somewhere(attach: Attach) -> None:
    """The square of the wave is to have a mean of 1, and its largest value is within 10 % of the right one."""
    assert abs(solve_well(attach, normalizes=True) - 2**0.5) < 0.14


# ------------------------------------------------------------------------------------ a variance of the outputs


@case(
    fault="unstable-formula",
    also=("loss-plateau", "exploding-gradient", "learning-rate-too-high", "gradient-spike", "non-finite"),
    tolerate=("overfitting",),
    onset=0,
    source="https://stats.stackexchange.com/questions/564809/using-a-neural-network-to-learn-linear-regression-variance",
    tags=("tabular", "regression", "loss"),
)
def variance_of_the_outputs(attach: Attach) -> None:
    """A regression is to learn how uncertain it is. The variance in its likelihood is that of its outputs, from patient
    to patient, and not that of the error: the outputs have to spread to make the error look small.
    """
    torch.manual_seed(753)
    data = load_diabetes()
    x = torch.tensor(data.data / data.data.std(0), dtype=torch.float32)
    y = torch.tensor((data.target - data.target.mean()) / data.target.std(), dtype=torch.float32)[:, None]
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer)
    for i in draws(len(x), size=32, steps=300):
        outputs = model(x[i])
        precision = 1 / torch.var(outputs)
        loss = 0.5 * precision * (outputs - y[i]).square().mean() - 0.5 * precision.log()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])


# ------------------------------------------------------------------------------------ an entropy that is squared


class Pilot(nn.Module):
    """A policy of squashed normals."""

    def __init__(self, size: int = 6) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(size, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.mean, self.spread = nn.Linear(64, size), nn.Linear(64, size)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions in -1..1 and their log-probabilities."""
        seen = self.body(state)
        spread = self.spread(seen).clamp(-8, 2).exp()
        drawn = self.mean(seen) + spread * torch.randn_like(spread)
        squashed = torch.tanh(drawn)
        normal = torch.distributions.Normal(self.mean(seen), spread)
        change = 2 * (0.6931 - drawn - F.softplus(-2 * drawn))
        return squashed, (normal.log_prob(drawn) - change).sum(1, keepdim=True)


def fly(attach: Attach, *, target_entropy: float) -> float:
    """Return the mean entropy of the policy at the end. The reward is the distance from the middle, negative."""
    torch.manual_seed(754)
    size = 6
    pilot = Pilot(size)
    critic = nn.Sequential(nn.Linear(2 * size, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    target = copy.deepcopy(critic).requires_grad_(False)
    warmth = nn.Parameter(torch.zeros(()))
    model = nn.ModuleDict({"pilot": pilot, "critic": critic})
    model.register_parameter("log_temperature", warmth)
    moving = torch.optim.Adam(pilot.parameters(), lr=3e-3)
    judging = torch.optim.Adam(critic.parameters(), lr=3e-3)
    warming = torch.optim.Adam([warmth], lr=0.02)
    monitor = attach(model, [moving, judging, warming])
    entropy = 0.0
    state = torch.rand(256, size) * 2 - 1
    for _ in range(400):
        with torch.no_grad():
            action, _ = pilot(state)
            after = (state + 0.3 * action + 0.05 * torch.randn_like(state)).clamp(-2, 2)
            following, chance = pilot(after)
            value = target(torch.cat([after, following], 1)) - warmth.exp() * chance
            wanted = -after.norm(dim=1, keepdim=True) + 0.9 * value
        loss = F.mse_loss(critic(torch.cat([state, action], 1)), wanted)
        judging.zero_grad()
        loss.backward()
        judging.step()
        chosen, chance = pilot(state)
        loss_of_pilot = (warmth.exp().detach() * chance - critic(torch.cat([state, chosen], 1))).mean()
        moving.zero_grad()
        loss_of_pilot.backward()
        moving.step()
        loss_of_warmth = -(warmth * (chance.detach() + target_entropy)).mean()
        warming.zero_grad()
        loss_of_warmth.backward()
        warming.step()
        with torch.no_grad():
            for theirs, ours in zip(target.parameters(), critic.parameters(), strict=True):
                theirs.lerp_(ours, 0.02)
        monitor.step(loss, batch=state)
        entropy = -chance.mean().item()
        state = torch.where(torch.rand(256, 1) < 0.1, torch.rand(256, size) * 2 - 1, after)
    return entropy


@case(
    fault="loss-plateau",
    also=("saturated-activation", "policy-divergence", "vanishing-gradient"),
    onset=0,
    source="https://github.com/Unity-Technologies/ml-agents/pull/5372",
    tags=("rl", "actor-critic", "entropy"),
)
def entropy_that_is_squared(attach: Attach) -> None:
    """The entropy of a policy of 6 actions is to be -6. By a broadcast it is -36. The temperature falls, and with it
    the exploration: the entropy is -12 after 400 updates.
    """
    fly(attach, target_entropy=-36)


@case(source="the repaired twin of `entropy_that_is_squared`", tags=("rl", "actor-critic", "entropy", "twin"))
def entropy_that_is_right(attach: Attach) -> None:
    """The entropy is to be -6, and stays above -10."""
    assert fly(attach, target_entropy=-6) > -10
