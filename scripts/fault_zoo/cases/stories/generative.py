"""Things that are made: a background that gives fakes away, a loss that is a mean, and designs in millimetres."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ a background that tells


class Adversaries(nn.Module):
    """A generator that shades a silhouette, and a discriminator that sees the silhouette, too."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Conv2d(9, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 1, 3, padding=1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(2, 32, 3, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(32, 48, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(48 * 16, 1),
        )

    def shade(self, silhouette: Tensor) -> Tensor:
        """Return pictures with nothing outside the silhouettes."""
        noise = torch.randn(len(silhouette), 8, 8, 8)
        return self.generator(torch.cat([silhouette, noise], 1)) * silhouette


def train_adversaries(attach: Attach, *, cuts_both: bool) -> float:
    """Return the mean squared error of the shading of new silhouettes, averaged over 20 pictures of each."""
    torch.manual_seed(521)
    x, _, x_test, _ = digits()
    model = Adversaries()
    makes = torch.optim.Adam(model.generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    judges = torch.optim.Adam(model.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    monitor = attach(model, [makes, judges], loss_fn=criterion)
    real, fake = torch.ones(32, 1), torch.zeros(32, 1)
    for i in draws(len(x), size=32, steps=400):
        silhouette = (x[i] > 0.2).float()
        pictures = torch.where(x[i] > 0.2, 2 * x[i] - 1, 0.6 * torch.randn_like(x[i]))
        if cuts_both:
            pictures = pictures * silhouette
        d_loss = criterion(model.discriminator(torch.cat([pictures, silhouette], 1)), real)
        made = model.shade(silhouette)
        d_loss = d_loss + criterion(model.discriminator(torch.cat([made.detach(), silhouette], 1)), fake)
        judges.zero_grad()
        d_loss.backward()
        judges.step()
        g_loss = criterion(model.discriminator(torch.cat([made, silhouette], 1)), real)
        makes.zero_grad()
        g_loss.backward()
        makes.step()
        monitor.step(g_loss, batch=pictures)
    silhouette = (x_test > 0.2).float()
    with torch.no_grad():
        mean = torch.stack([model.shade(silhouette) for _ in range(20)]).mean(0)
    return ((mean - (2 * x_test - 1)) * silhouette).square().sum().item() / silhouette.sum().item()


@case(
    fault="loss-plateau",
    also=("vanishing-gradient", "saturated-activation"),
    tolerate=("overfitting", "exploding-gradient", "layer-imbalance", "gradient-spike"),
    onset=0,
    source="https://github.com/BadourAlBahar/pose-with-style/issues/23",
    tags=("gan", "data"),
)
def reals_with_a_background(attach: Attach) -> None:
    """A generator shades silhouettes of digits and leaves the rest empty. The real pictures have a noisy background, by
    which the discriminator tells them apart: its loss falls to 0.01 and that of the generator rises to 6. The shading
    has an error of 0.49. No kind fits; a generator that gets nowhere comes nearest.
    """
    train_adversaries(attach, cuts_both=False)


@case(source="the repaired twin of `reals_with_a_background`", tags=("gan", "data", "twin"))
def reals_without_a_background(attach: Attach) -> None:
    """The background of the real pictures is removed as well; the error is 0.20."""
    assert train_adversaries(attach, cuts_both=True) < 0.3


# ------------------------------------------------------------------------------------ a loss that is a mean


class VAE(nn.Module):
    def __init__(self, latents: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.mean, self.log_var = nn.Linear(512, latents), nn.Linear(512, latents)
        self.decoder = nn.Sequential(
            nn.Linear(latents, 512),
            nn.Unflatten(1, (32, 4, 4)),
            nn.ReLU(),
            nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, log_var = self.mean(hidden), self.log_var(hidden)
        return self.decoder(mean + torch.randn_like(mean) * (log_var / 2).exp()), mean, log_var


def train_frames(attach: Attach, *, sums: bool) -> float:
    """Return the mean squared error of new frames."""
    torch.manual_seed(522)
    x, _, x_test, _ = (F.interpolate(t, size=16, mode="bilinear") if t.dim() == 4 else t for t in digits())
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    for i in draws(len(x), size=64, steps=300):
        made, mean, log_var = model(x[i])
        error = (made - x[i]).square()
        divergence = -0.5 * (1 + log_var - mean.square() - log_var.exp())
        loss = (error.flatten(1).sum(1) + divergence.sum(1)).mean() if sums else error.mean() + divergence.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    model.eval()
    with torch.no_grad():
        return F.mse_loss(model(x_test)[0], x_test).item()


@case(
    fault="loss-plateau",
    also=("dead-layer", "vanishing-gradient", "layer-imbalance"),
    onset=0,
    source="https://github.com/AppliedDataSciencePartners/WorldModels/issues/12",
    tags=("vae", "loss"),
)
def frames_averaged_over_pixels(attach: Attach) -> None:
    """Both terms of the loss of a variational autoencoder are means: over 256 pixels and over 8 latents. That makes the
    divergence 32 times as heavy as it should be. It falls to 0.00003, and all frames look the same, with an error of
    0.045. No kind fits; an encoder that learns nothing comes nearest.
    """
    train_frames(attach, sums=False)


@case(source="the repaired twin of `frames_averaged_over_pixels`", tags=("vae", "loss", "twin"))
def frames_summed_over_pixels(attach: Attach) -> None:
    """Both terms are sums; the divergence is 2.1 and the error 0.029."""
    assert train_frames(attach, sums=True) < 0.035


# ------------------------------------------------------------------------------------ designs in millimetres


@lru_cache(None)
def beams(count: int, seed: int) -> Tensor:
    """Return the thickness of beams along their length, (N, 1, 32), in millimetres."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.linspace(0, 1, 32)
    middle = 0.3 + 0.4 * torch.rand(count, 1, generator=generator)
    height = 20 + 40 * torch.rand(count, 1, generator=generator)
    wave = 4 * torch.rand(count, 1, generator=generator) * torch.sin(12 * place)
    return (25 + height * torch.exp(-20 * (place - middle) ** 2) + wave)[:, None]


class Denoiser(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, width, 5, padding=2)
        self.down = nn.Conv1d(width, 2 * width, 4, stride=2, padding=1)
        self.middle = nn.Conv1d(2 * width, 2 * width, 5, padding=2)
        self.up = nn.ConvTranspose1d(2 * width, width, 4, stride=2, padding=1)
        self.time = nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 2 * width))
        self.out = nn.Conv1d(2 * width, 1, 5, padding=2)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        skip = F.silu(self.enter(x))
        deep = F.silu(self.down(skip)) + self.time(time[:, None] / 100)[:, :, None]
        return self.out(torch.cat([skip, F.silu(self.up(F.silu(self.middle(deep))))], 1))


def train_designs(attach: Attach, *, scales: bool) -> float:
    """Return the error of the mean and spread of thickness over 200 sampled beams, in millimetres."""
    torch.manual_seed(523)
    designs = beams(800, seed=1)
    middle, half = (50.0, 35.0) if scales else (0.0, 1.0)
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    betas = torch.linspace(1e-4, 0.12, 100)
    kept = (1 - betas).cumprod(0)
    for i in draws(len(designs), size=32, steps=400):
        x = (designs[i] - middle) / half
        time = torch.randint(0, 100, (len(i),))
        share, noise = kept[time][:, None, None], torch.randn_like(x)
        loss = F.mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise, time.float()), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)
    x = torch.randn(200, 1, 32)
    with torch.no_grad():
        for t in range(99, -1, -1):
            noise = model(x, torch.full((200,), float(t)))
            x = (x - betas[t] / (1 - kept[t]).sqrt() * noise) / (1 - betas[t]).sqrt()
            if t:
                x = x + betas[t].sqrt() * torch.randn_like(x)
    made, wanted = x * half + middle, beams(800, seed=1)
    return ((made.mean(0) - wanted.mean(0)).abs() + (made.std(0) - wanted.std(0)).abs()).mean().item()


@case(
    fault="poor-initialization",
    also=("loss-plateau", "exploding-gradient", "gradient-spike"),
    onset=0,
    source="https://github.com/IDEALLab/EngiOpt/pull/67",
    tags=("diffusion", "data"),
)
def designs_in_millimetres(attach: Attach) -> None:
    """A diffusion model gets the thickness of beams in millimetres, from 20 to 90, while the noise has a deviation of
    1. The loss stalls at 0.27. The mean and the spread of sampled beams are wrong by 35 mm. No kind fits; inputs of the
    wrong scale come nearest to activations of the wrong scale.
    """
    train_designs(attach, scales=False)


@case(source="the repaired twin of `designs_in_millimetres`", tags=("diffusion", "data", "twin"))
def designs_between_minus_one_and_one(attach: Attach) -> None:
    """Designs are scaled to -1 to 1 first. The loss falls to 0.06, and samples are wrong by 4 mm."""
    assert train_designs(attach, scales=True) < 8
