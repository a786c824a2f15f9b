"""Autoencoders, GANs, diffusion, flows, contrastive and metric learning. All of these runs are fine."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from scripts.fault_zoo.cases.healthy_data import digits, ring, shuffled
from scripts.fault_zoo.protocol import Attach, case


@case(
    source="denoising autoencoder with sigmoid outputs and BCELoss", tags=("autoencoder", "sigmoid", "saturated-output")
)
def denoising_autoencoder_sigmoid_bce(attach: Attach) -> None:
    """The output sigmoids of background pixels end up near 0 because those pixels are 0: a saturated output that is
    simply right.
    """
    torch.manual_seed(1)
    x, _, test_x, _ = digits(size=16, centre=False)
    x, test_x = (x > 0.5).float(), (test_x > 0.5).float()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 512),
        nn.ReLU(),
        nn.Unflatten(1, (32, 4, 4)),
        nn.ConvTranspose2d(32, 16, 2, 2),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 2, 2),
        nn.Sigmoid(),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loss_fn = nn.BCELoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 64, seed=1)
    for _ in range(350):
        idx = next(loader)
        noisy = x[idx] * (torch.rand_like(x[idx]) > 0.2)
        loss = loss_fn(model(noisy), x[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=noisy)
    with torch.no_grad():
        assert F.binary_cross_entropy(model(test_x), test_x) < 0.2


class VAE(nn.Module):
    def __init__(self, latent: int = 12) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU())
        self.mu, self.logvar = nn.Linear(128, latent), nn.Linear(128, latent)
        self.decoder = nn.Sequential(
            nn.Linear(latent, 128), nn.ReLU(), nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256)
        )

    def forward(self, x: Any) -> Any:
        h = self.encoder(x)
        mu, logvar = self.mu(h), self.logvar(h)
        return self.decoder(mu + torch.randn_like(mu) * (0.5 * logvar).exp()), mu, logvar


@case(source="KL annealing, Bowman et al. 2016", tags=("vae", "schedule", "rising-loss"))
def vae_kl_annealing(attach: Attach) -> None:
    """The weight of the KL term is raised from 0 to 1: the total loss first falls, then rises with the weight, and
    settles. As planned.
    """
    torch.manual_seed(2)
    x, _, test_x, _ = digits(size=16, centre=False)
    x, test_x = (x > 0.4).float(), (test_x > 0.4).float()
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    loader = shuffled(len(x), 128, seed=2)
    for step in range(500):
        idx = next(loader)
        logits, mu, logvar = model(x[idx])
        reconstruction = F.binary_cross_entropy_with_logits(logits, x[idx].flatten(1), reduction="sum") / len(idx)
        kl = -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(1).mean()
        beta = min(1.0, max(0.0, (step - 260) / 80))
        loss = reconstruction + beta * kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[idx])
    with torch.no_grad():
        logits, mu, logvar = model(test_x)
        elbo = (
            F.binary_cross_entropy_with_logits(logits, test_x.flatten(1), reduction="sum") / len(test_x)
            - 0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(1).mean()
        )
    assert elbo < 75, elbo


@case(
    source="WGAN-GP, Gulrajani et al. 2017; both networks are watched",
    tags=("gan", "double-backward", "two-optimizers", "negative-loss"),
    tolerate=("loss-plateau", "no-gradient"),
)
def wgan_gp_both_watched(attach: Attach) -> None:
    """Wasserstein GAN with gradient penalty (double backward): the critic's loss is negative and shrinks towards zero;
    its last bias cancels.
    """
    torch.manual_seed(4)
    generator = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    critic = nn.Sequential(nn.Linear(2, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 1))
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
    watch_g, watch_d = attach(generator, opt_g), attach(critic, opt_d)
    for _ in range(300):
        for _ in range(3):
            real, fake = ring(128), generator(torch.randn(128, 8)).detach()
            mixed = torch.lerp(real, fake, torch.rand(128, 1)).requires_grad_(True)
            (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            d_loss = critic(fake).mean() - critic(real).mean() + 5 * ((slope.norm(dim=1) - 1) ** 2).mean()
            opt_d.zero_grad()
            d_loss.backward()
            opt_d.step()
            watch_d.step(d_loss)
        g_loss = -critic(generator(torch.randn(128, 8))).mean()
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()
        watch_g.step(g_loss)
    with torch.no_grad():
        radius = generator(torch.randn(2000, 8)).norm(dim=1)
    assert (radius.mean() - 2).abs() < 0.4
    assert d_loss.abs() < 0.5


class Coupling(nn.Module):
    def __init__(self, flip: bool, width: int = 96) -> None:
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(
            nn.Linear(1, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        )
        last: Any = self.net[-1]
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = (x[:, 1:], x[:, :1]) if self.flip else (x[:, :1], x[:, 1:])
        log_scale, shift = self.net(a).chunk(2, 1)
        log_scale = torch.tanh(log_scale)
        b = b * log_scale.exp() + shift
        return (torch.cat([b, a], 1) if self.flip else torch.cat([a, b], 1)), log_scale.squeeze(1)


@case(source="RealNVP, Dinh et al. 2017, on two moons", tags=("flow", "negative-loss", "zero-init"))
def normalising_flow_negative_loss(attach: Attach) -> None:
    """Negative log-likelihood of a density: it falls below zero and on. Each coupling starts as the identity."""
    torch.manual_seed(6)
    from sklearn.datasets import make_moons

    data, _ = make_moons(6000, noise=0.03, random_state=6)
    data = torch.tensor(data, dtype=torch.float32) * 0.6
    model = nn.ModuleList(Coupling(i % 2 == 1) for i in range(8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500)
    monitor = attach(model, optimizer)
    loader = shuffled(len(data), 192, seed=6)
    for _ in range(500):
        z, log_det = data[next(loader)], 0
        for layer in model:
            z, d = layer(z)
            log_det = log_det + d
        loss = (0.5 * (z**2).sum(1) + math.log(2 * math.pi) - log_det).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        monitor.step(loss)
    assert loss.item() < 0.2, loss.item()


@case(source="SimCLR, Chen et al. 2020, NT-Xent with temperature 0.2", tags=("contrastive", "cnn"))
def simclr_contrastive(attach: Attach) -> None:
    """Contrastive pretraining: the loss starts at log(2N-1) and levels out well above zero."""
    torch.manual_seed(8)
    x, y, test_x, test_y = digits(size=16)
    encoder = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 64),
    )
    model = nn.Sequential(encoder, nn.Sequential(nn.ReLU(), nn.Linear(64, 32)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    loader = shuffled(len(x), 96, seed=8)

    def view(images: Tensor) -> Tensor:
        shift = torch.randint(-2, 3, (2,))
        return images.roll(tuple(shift.tolist()), (2, 3)) * (
            0.7 + 0.6 * torch.rand(len(images), 1, 1, 1)
        ) + 0.3 * torch.randn_like(images)

    for _ in range(150):
        idx = next(loader)
        both = torch.cat([view(x[idx]), view(x[idx])])
        z = F.normalize(model(both), dim=1)
        similarity = z @ z.T / 0.2
        similarity.fill_diagonal_(-1e9)
        target = torch.arange(192).roll(96)
        loss = F.cross_entropy(similarity, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=both)
    encoder.eval()
    with torch.no_grad():
        train, test = F.normalize(encoder(x), dim=1), F.normalize(encoder(test_x), dim=1)
        nearest = y[(test @ train.T).argmax(1)]
    assert (nearest == test_y).float().mean() > 0.93


class TwoTowers(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, dim))
        self.text = nn.Sequential(
            nn.Embedding(40, 48), nn.Flatten(), nn.Linear(3 * 48, 128), nn.GELU(), nn.Linear(128, dim)
        )
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        a, b = F.normalize(self.image(images), dim=1), F.normalize(self.text(words), dim=1)
        return self.logit_scale.exp() * a @ b.T


@case(source="CLIP, Radford et al. 2021: learned logit scale", tags=("contrastive", "scalar-parameter", "embedding"))
def clip_two_towers_logit_scale(attach: Attach) -> None:
    """A single scalar multiplies all logits; its gradient is on another scale than the weights', and some word rows are
    absent per step.
    """
    torch.manual_seed(11)
    x, y, test_x, test_y = digits()

    def caption(labels: Tensor) -> Tensor:
        return torch.stack(
            [labels, 10 + torch.randint(0, 15, labels.shape), 25 + torch.randint(0, 15, labels.shape)], 1
        )

    model = TwoTowers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    monitor = attach(model, optimizer)
    loader = shuffled(len(x), 128, seed=11)
    for _ in range(400):
        idx = next(loader)
        logits = model(x[idx], caption(y[idx]))
        target = (y[idx][:, None] == y[idx][None]).float()
        target = target / target.sum(1, keepdim=True)
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=math.log(100))
        monitor.step(loss, batch=x[idx])
    with torch.no_grad():
        scores = model(test_x, caption(torch.arange(10)))
        assert (scores.argmax(1) == test_y).float().mean() > 0.93


@case(
    source="sparse autoencoders with an L1 penalty (dictionary learning)",
    tags=("autoencoder", "sparsity", "dead-units"),
    tolerate=("rising-sparsity", "dead-relu"),
)
def sparse_autoencoder_l1(attach: Attach) -> None:
    """An L1 penalty makes the code sparse: two thirds zeros at the end and some latents unused. Sparsity is the aim
    here.
    """
    torch.manual_seed(12)
    dictionary = F.normalize(torch.randn(96, 64), dim=1)

    def batch(n: int) -> Tensor:
        code = torch.rand(n, 96) * (torch.rand(n, 96) < 0.05)
        return code @ dictionary + 0.01 * torch.randn(n, 64)

    class SparseAutoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(64, 384)
            self.relu = nn.ReLU()
            self.decoder = nn.Linear(384, 64)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.relu(self.encoder(x))
            return self.decoder(z), z

    model = SparseAutoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    for _ in range(500):
        x = batch(384)
        out, z = model(x)
        loss = F.mse_loss(out, x, reduction="none").sum(1).mean() + 0.02 * z.sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.decoder.weight.copy_(F.normalize(model.decoder.weight, dim=0))
        monitor.step(loss, batch=x)
    with torch.no_grad():
        x = batch(2000)
        out, z = model(x)
        assert (z == 0).float().mean() > 0.6
        assert ((out - x) ** 2).sum(1).mean() < 0.15 * (x**2).sum(1).mean()
