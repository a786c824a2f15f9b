"""Autoencoders, GANs, diffusion, flows, contrastive and metric learning. All of these runs are fine."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from scripts.fault_zoo.cases.healthy_data import digits, ring, shuffled
from scripts.fault_zoo.protocol import Attach, case


@case(source="summed reconstruction error, as in many VAE/AE scripts", tags=("autoencoder", "large-scale"))
def autoencoder_sum_over_pixels(attach: Attach) -> None:
    """The loss is summed over pixels and the batch: values of tens of thousands and gradient norms in the thousands are
    its unit.
    """
    torch.manual_seed(0)
    x, _, test_x, _ = digits(size=16)
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, 16),
        nn.Linear(16, 64),
        nn.ReLU(),
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.MSELoss(reduction="sum")
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 128)
    for _ in range(450):
        idx = next(loader)
        loss = loss_fn(model(x[idx]), x[idx].flatten(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[idx])
    with torch.no_grad():
        assert F.mse_loss(model(test_x), test_x.flatten(1)) < 0.35 * test_x.var()


@case(
    source="non-saturating GAN with spectral norm, Miyato et al. 2018; only the generator is watched",
    tags=("gan", "spectral-norm", "two-optimizers"),
    tolerate=("loss-plateau",),
)
def gan_ring_generator_watched(attach: Attach) -> None:
    """GAN on eight Gaussians: the generator's loss is a game value and does not fall; the samples get good. Spectral
    norm in the critic.
    """
    torch.manual_seed(3)
    from torch.nn.utils.parametrizations import spectral_norm

    generator = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    critic = nn.Sequential(
        spectral_norm(nn.Linear(2, 128)),
        nn.LeakyReLU(0.2),
        spectral_norm(nn.Linear(128, 128)),
        nn.LeakyReLU(0.2),
        spectral_norm(nn.Linear(128, 1)),
    )
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    monitor = attach(generator, opt_g)
    for _ in range(500):
        real, fake = ring(192), generator(torch.randn(192, 8)).detach()
        d_loss = F.softplus(-8 * critic(real)).mean() + F.softplus(8 * critic(fake)).mean()
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()
        g_loss = F.softplus(-8 * critic(generator(torch.randn(192, 8)))).mean()
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()
        monitor.step(g_loss)
    with torch.no_grad():
        sample = generator(torch.randn(2000, 8))
        centres = torch.stack(
            [torch.tensor([math.cos(a), math.sin(a)]) * 2 for a in torch.arange(8) * (2 * math.pi / 8)]
        )
        distance, nearest = torch.cdist(sample, centres).min(1)
    assert (distance < 0.5).float().mean() > 0.6
    assert len(nearest[distance < 0.5].unique()) >= 6


class Denoiser(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width))
        self.inp = nn.Linear(64, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
            for _ in range(3)
        )
        self.out = nn.Linear(width, 64)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(1000) * torch.arange(16) / 16)
        angles = t[:, None].float() * frequencies
        h = self.inp(x) + self.time(torch.cat([angles.sin(), angles.cos()], 1))
        for block in self.blocks:
            h = h + block(h)
        return self.out(h)


@case(
    source="DDPM, Ho et al. 2020: zero-initialised output layer, EMA, clipping",
    tags=("diffusion", "zero-init", "ema", "noisy"),
)
def diffusion_zero_init_output(attach: Attach) -> None:
    """Diffusion: the output layer starts at zero, so in step 0 nothing before it has a gradient; later the loss is
    noisy at its floor.
    """
    torch.manual_seed(5)
    x, _, _, _ = digits()
    x = x.flatten(1)
    T = 200
    alpha_bar = torch.cumprod(1 - torch.linspace(1e-3, 0.05, T), 0)
    model = Denoiser()
    ema = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer)
    loader, history = shuffled(len(x), 96, seed=5), []
    for _ in range(400):
        idx = next(loader)
        t, noise = torch.randint(0, T, (96,)), torch.randn(96, 64)
        a = alpha_bar[t][:, None]
        loss = F.mse_loss(model(a.sqrt() * x[idx] + (1 - a).sqrt() * noise, t), noise)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(ema.parameters(), model.parameters(), strict=False):
                p.lerp_(q, 0.02)
        history.append(loss.item())
        monitor.step(loss)
    assert sum(history[-40:]) / 40 < 0.35, sum(history[-40:]) / 40


class MixtureDensity(nn.Module):
    def __init__(self, parts: int = 6) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
        self.weight, self.mean, self.log_sigma = nn.Linear(256, parts), nn.Linear(256, parts), nn.Linear(256, parts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.body(x)
        return F.log_softmax(self.weight(h), 1), self.mean(h), self.log_sigma(h).clamp(-5, 3)


@case(source="mixture density network, Bishop 1994", tags=("mdn", "clipping", "natural-spikes", "negative-loss"))
def mixture_density_network(attach: Attach) -> None:
    """When the components get narrow a point in between gives a gradient several times the usual one; clipping handles
    it.
    """
    torch.manual_seed(7)
    model = MixtureDensity()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 600)
    monitor = attach(model, optimizer)
    history = []
    for _ in range(600):
        y = torch.rand(192, 1) * 2 - 1
        x = (
            y + 0.3 * torch.sin(2 * math.pi * y) + 0.03 * torch.randn(192, 1)
        )  # the inverse problem: several y for one x
        logw, mean, log_sigma = model(x)
        loss = -torch.logsumexp(logw - 0.5 * ((y - mean) / log_sigma.exp()) ** 2 - log_sigma - 0.919, 1).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        history.append(loss.item())
        monitor.step(loss, batch=x)
    assert sum(history[-50:]) / 50 < -0.15, sum(history[-50:]) / 50


class BYOL(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 64)
        )
        self.predictor = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64))
        self.target = copy.deepcopy(self.online).requires_grad_(False)


@case(
    source="BYOL, Grill et al. 2020: momentum target without gradient",
    tags=("self-supervised", "ema", "no-grad-target"),
)
def byol_momentum_target(attach: Attach) -> None:
    """The target network inside the model never gets a gradient and is not in the optimizer: it follows by moving
    average.
    """
    torch.manual_seed(9)
    x, y, test_x, test_y = digits()
    model = BYOL()
    optimizer = torch.optim.AdamW(
        [*model.online.parameters(), *model.predictor.parameters()], lr=2e-3, weight_decay=1e-4
    )
    monitor = attach(model, optimizer)
    loader = shuffled(len(x), 192, seed=9)

    def view(images: Tensor) -> Tensor:
        return images * (torch.rand_like(images) > 0.25) + 0.3 * torch.randn_like(images)

    for _ in range(300):
        idx = next(loader)
        a, b = view(x[idx]), view(x[idx])
        with torch.no_grad():
            ta, tb = F.normalize(model.target(a), dim=1), F.normalize(model.target(b), dim=1)
        pa, pb = (
            F.normalize(model.predictor(model.online(a)), dim=1),
            F.normalize(model.predictor(model.online(b)), dim=1),
        )
        loss = (2 - 2 * (pa * tb).sum(1)).mean() + (2 - 2 * (pb * ta).sum(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(model.target.parameters(), model.online.parameters(), strict=False):
                p.lerp_(q, 0.02)
        monitor.step(loss, batch=a)
    model.eval()
    with torch.no_grad():
        train, test = F.normalize(model.online(x), dim=1), F.normalize(model.online(test_x), dim=1)
        assert train.std(0).mean() > 0.05  # it has not collapsed
        assert (y[(test @ train.T).argmax(1)] == test_y).float().mean() > 0.9


@case(source="FaceNet, Schroff et al. 2015: random triplets", tags=("metric-learning", "natural-zeros"))
def triplet_loss_few_active(attach: Attach) -> None:
    """As the embedding gets good most triplets are satisfied: loss and gradient shrink and are now and then exactly
    zero.
    """
    torch.manual_seed(10)
    x, y, test_x, test_y = digits()
    x, test_x = x.flatten(1), test_x.flatten(1)
    model = nn.Sequential(nn.Linear(64, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    monitor = attach(model, optimizer)
    loader = shuffled(len(x), 96, seed=10)
    for _ in range(400):
        idx = next(loader)
        z = F.normalize(model(x[idx]), dim=1)
        same = (y[idx][:, None] == y[idx][None]).float()
        positive, negative = torch.multinomial(same, 1).squeeze(1), torch.multinomial(1 - same, 1).squeeze(1)
        loss = F.relu((z - z[positive]).pow(2).sum(1) - (z - z[negative]).pow(2).sum(1) + 0.4).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[idx])
    with torch.no_grad():
        train, test = F.normalize(model(x), dim=1), F.normalize(model(test_x), dim=1)
        assert (y[torch.cdist(test, train).argmin(1)] == test_y).float().mean() > 0.95
