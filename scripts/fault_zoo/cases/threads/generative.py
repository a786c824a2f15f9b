"""Generators: a judge that the forger moves, a divergence that outweighs the frames, and two runs that look odd."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ a judge that the forger moves


def two_moons(count: int) -> Tensor:
    """Return noisy points on two half circles."""
    turn = math.pi * torch.rand(count)
    upper = torch.rand(count) < 0.5
    x = torch.where(upper, turn.cos() - 0.5, 0.5 - turn.cos())
    y = torch.where(upper, turn.sin() - 0.25, 0.25 - turn.sin())
    return torch.stack([x, y], 1) + 0.05 * torch.randn(count, 2)


def distance_of_clouds(a: Tensor, b: Tensor) -> float:
    """Return the energy distance of two sets of points, 0 if they are distributed alike."""
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


def train_gan(attach: Attach, *, var_list: bool) -> float:
    """Return the energy distance of generated points and true ones."""
    torch.manual_seed(251)
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    discriminator = nn.Sequential(
        nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
    )
    model = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    of_forger = generator.parameters() if var_list else model.parameters()
    g_optimizer = torch.optim.Adam(of_forger, lr=1e-3, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    monitor = attach(model, [g_optimizer, d_optimizer])
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
    for _ in range(1500):
        real = two_moons(64)
        fake = generator(torch.randn(64, 8))
        d_loss = F.binary_cross_entropy_with_logits(discriminator(real), ones)
        d_loss = d_loss + F.binary_cross_entropy_with_logits(discriminator(fake), zeros)
        model.zero_grad()
        d_loss.backward()
        d_optimizer.step()
        g_loss = F.binary_cross_entropy_with_logits(discriminator(generator(torch.randn(64, 8))), ones)
        model.zero_grad()
        g_loss.backward()
        g_optimizer.step()
        monitor.step(d_loss, batch=real)
    with torch.no_grad():
        return distance_of_clouds(generator(torch.randn(500, 8)), two_moons(500))


@case(
    fault="oscillating-gradient",
    also=("exploding-gradient", "learning-rate-too-high"),
    onset=0,
    source="https://github.com/soumith/ganhacks/issues/29",
    tags=("gan", "optimizer"),
)
def judge_moved_by_the_forger(attach: Attach) -> None:
    """The optimizer of the generator holds the weights of both networks, so that its step teaches the discriminator to
    call forgeries real. The two optimizers work against each other: the loss of the discriminator rises from 1.4 to 10.
    """
    train_gan(attach, var_list=False)


@case(source="the repaired twin of `judge_moved_by_the_forger`", tags=("gan", "optimizer", "twin"))
def judge_left_alone(attach: Attach) -> None:
    """Each optimizer holds its own network."""
    assert train_gan(attach, var_list=True) < 0.2


# ------------------------------------------------------------------------------------ a divergence that outweighs


def frames(count: int) -> Tensor:
    """Return frames (N, 1, 32, 32) of a racing game: a gray road that bends, in gray grass, and a car that stays."""
    row, column = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    bend, slope, offset = (torch.randn(count, 1, 1) for _ in range(3))
    ahead = (31 - row) / 31
    road = (column - 15.5 - 3 * offset - 8 * slope * ahead - 6 * bend * ahead**2).abs() < 6
    car = (row > 24) & (row < 29) & ((column - 15.5).abs() < 2)
    return torch.where(car, 0.1, torch.where(road, 0.42, 0.6))[:, None]


class WorldModel(nn.Module):
    """A convolutional VAE of frames."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.mean, self.log_var = nn.Linear(512, 16), nn.Linear(512, 16)
        self.decoder = nn.Sequential(
            nn.Linear(16, 512),
            nn.Unflatten(1, (32, 4, 4)),
            nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, log_var = self.mean(hidden), self.log_var(hidden)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * log_var).exp()), mean, log_var


def train_world_model(attach: Attach, *, summed: bool) -> tuple[float, float]:
    """Return the mean squared error of new frames, and the divergence of one latent, in nats."""
    torch.manual_seed(252)
    x, x_test = frames(2000), frames(200)
    model = WorldModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer)
    for i in draws(len(x), size=64, steps=400):
        frame, mean, log_var = model(x[i])
        error = (frame - x[i]) ** 2
        divergence = -0.5 * (1 + log_var - mean**2 - log_var.exp())
        if summed:
            loss = error.sum((1, 2, 3)).mean() + divergence.sum(1).clamp(min=0.5 * 16).mean()
        else:
            loss = 10 * error.mean() + divergence.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        frame, mean, log_var = model(x_test)
        divergence = -0.5 * (1 + log_var - mean**2 - log_var.exp())
        return F.mse_loss(frame, x_test).item(), divergence.mean().item()


@case(
    fault="dead-layer",
    also=("vanishing-gradient", "loss-plateau", "no-gradient"),
    layers=("encoder", "mean", "log_var"),
    onset=40,
    source="https://github.com/AppliedDataSciencePartners/WorldModels/issues/12",
    tags=("vae", "loss"),
)
def divergence_outweighs_the_frames(attach: Attach) -> None:
    """The error is a mean over all pixels, times 10, and the divergence a mean over the latents. The posterior
    collapses: the divergence falls to 6e-5 nats, and the error (0.0052) is that of the mean of all frames (0.0054).
    With sums and a floor for the divergence it is 0.0022.
    """
    train_world_model(attach, summed=False)


# ------------------------------------------------------------------------------------ two that look odd


@case(source="https://github.com/martinarjovsky/WassersteinGAN/issues/31", tags=("gan", "wasserstein", "odd"))
def critic_on_tiny_batches(attach: Attach) -> None:
    """A Wasserstein critic with clipped weights, on batches of 16 points. Its loss oscillates from step to step. The
    answer was that this does not mean that training is unstable: different minibatches have different losses.
    """
    torch.manual_seed(253)
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    model = nn.ModuleDict({"generator": generator, "critic": critic})
    g_optimizer = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
    c_optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    monitor = attach(model, [g_optimizer, c_optimizer])
    with torch.no_grad():
        before = distance_of_clouds(generator(torch.randn(500, 4)), two_moons(500))
    for _ in range(300):
        for _ in range(5):
            with torch.no_grad():
                fake = generator(torch.randn(16, 4))
            real = two_moons(16)
            c_loss = critic(fake).mean() - critic(real).mean()
            c_optimizer.zero_grad()
            c_loss.backward()
            c_optimizer.step()
            with torch.no_grad():
                for weight in critic.parameters():
                    weight.clamp_(-0.1, 0.1)
        g_loss = -critic(generator(torch.randn(16, 4))).mean()
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
        monitor.step(c_loss, batch=real)
    with torch.no_grad():
        after = distance_of_clouds(generator(torch.randn(500, 4)), two_moons(500))
    assert after < 0.2 * before, (before, after)


class Coupling(nn.Module):
    """Shift and scale half of the features by a function of the other half."""

    def __init__(self, size: int, *, flipped: bool) -> None:
        super().__init__()
        self.flipped = flipped
        self.net = nn.Sequential(nn.Linear(size // 2, 64), nn.ReLU(), nn.Linear(64, size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = x.chunk(2, 1)[:: -1 if self.flipped else 1]
        scale, shift = self.net(kept).chunk(2, 1)
        scale = 1.9 * torch.tanh(scale / 1.9)
        parts = [kept, moved * scale.exp() + shift]
        return torch.cat(parts[:: -1 if self.flipped else 1], 1), scale.sum(1)


@case(source="https://github.com/marco-rudolph/cs-flow/issues/28", tags=("flow", "likelihood", "odd"))
def likelihood_above_one(attach: Attach) -> None:
    """A flow learns the density of features of faultless parts, to find faulty ones. The loss goes below zero. The
    answer was that this is normal: it is the negative logarithm of a density, which may be above one.
    """
    torch.manual_seed(254)
    x, y, x_test, y_test = digits()
    _, _, axes = torch.pca_lowrank(x.flatten(1), 16)
    good = 0.3 * (x[y < 8].flatten(1) @ axes)
    model = nn.Sequential(*(Coupling(16, flipped=bool(k % 2)) for k in range(6)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)
    monitor = attach(model, optimizer)

    def negative_log_likelihood(z: Tensor) -> Tensor:
        volume = torch.zeros(len(z))
        for coupling in model:
            z, change = coupling(z)
            volume = volume + change
        return (0.5 * z**2).sum(1) - volume

    losses = []
    for i in draws(len(good), size=64, steps=400):
        loss = negative_log_likelihood(good[i]).mean() / 16
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.step(loss, batch=good[i])
        losses.append(loss.item())
    with torch.no_grad():
        strange = negative_log_likelihood(0.3 * (x_test.flatten(1) @ axes))
    assert losses[-1] < 0 < losses[0]
    assert strange[y_test >= 8].mean() > strange[y_test < 8].mean()
