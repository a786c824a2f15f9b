"""Models that generate: diffusion, VQ-VAE, GANs and a flow."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from sklearn.datasets import make_moons
from torch import Tensor, nn

from scripts.fault_zoo.cases.faulty_data import batches, digits, setup
from scripts.fault_zoo.protocol import Attach, case


class Denoiser(nn.Module):
    """Predict the noise in a picture of a digit."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width))
        self.entry = nn.Linear(64, width)
        self.middle = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.exit = nn.Linear(width, 64)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.exp(-math.log(1000) * torch.arange(16) / 16)
        h = self.entry(x) + self.time(torch.cat([angles.sin(), angles.cos()], 1))
        for layer in self.middle:
            h = h + layer(F.silu(h))
        return self.exit(F.silu(h))


def zero_terminal_schedule(steps: int = 1000) -> Tensor:
    """Return the products of the alphas, shifted and scaled so that the last one is 0 (arXiv:2305.08891)."""
    roots = torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), 0).sqrt()
    return ((roots - roots[-1]) * roots[0] / (roots[0] - roots[-1])) ** 2


def train_min_snr(attach: Attach, *, guard: bool) -> list[float]:
    """Train with the weights of Min-SNR-5."""
    setup(11)
    x, _ = digits()
    x = x.flatten(1) * 2 - 1
    kept = zero_terminal_schedule()
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    losses = []
    for (clean,) in batches(x, size=64, steps=300):
        t = torch.randint(0, 1000, (len(clean),))
        noise = torch.randn_like(clean)
        noisy = kept[t].sqrt()[:, None] * clean + (1 - kept[t]).sqrt()[:, None] * noise
        snr = kept[t] / (1 - kept[t])
        weight = snr.clamp(max=5.0) / snr
        if guard:
            weight = torch.where(snr == 0, torch.ones_like(snr), weight)
        loss = (weight * F.mse_loss(model(noisy, t), noise, reduction="none").mean(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=clean)
        losses.append(loss.item())
    return losses


@case(
    fault="non-finite",
    also=("unstable-formula",),
    onset=13,
    source=(
        "https://github.com/TiankaiHang/Min-SNR-Diffusion-Training/issues/2, "
        "https://github.com/TiankaiHang/Min-SNR-Diffusion-Training/pull/4"
    ),
    tags=("diffusion",),
)
def diffusion_min_snr_weight(attach: Attach) -> None:
    """The schedule ends at a signal-to-noise ratio of 0, so the weight of the last timestep is 0 / 0."""
    train_min_snr(attach, guard=False)


@case(source="https://github.com/TiankaiHang/Min-SNR-Diffusion-Training/pull/4", tags=("diffusion", "twin"))
def diffusion_min_snr_weight_fixed(attach: Attach) -> None:
    """The weight is 1 where the signal-to-noise ratio is 0."""
    losses = train_min_snr(attach, guard=True)
    assert sum(losses[-30:]) < 0.5 * sum(losses[:30])


class VectorQuantized(nn.Module):
    """A digit becomes four codes of a codebook and is painted again from them."""

    def __init__(self, codes: int = 64, dim: int = 16) -> None:
        super().__init__()
        self.dim = dim
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4 * dim))
        self.codebook = nn.Embedding(codes, dim)
        nn.init.uniform_(self.codebook.weight, -1 / codes, 1 / codes)
        self.decoder = nn.Sequential(nn.Linear(4 * dim, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        encoded = self.encoder(x).view(-1, self.dim)
        code = torch.cdist(encoded, self.codebook.weight).argmin(1)
        chosen = self.codebook(code)
        straight = encoded + (chosen - encoded).detach()
        return self.decoder(straight.view(len(x), -1)), encoded, chosen, straight


def train_codebook(attach: Attach, *, on_chosen: bool) -> tuple[VectorQuantized, Tensor]:
    """Train with the loss of the reconstruction, the codebook and the commitment."""
    setup(12)
    x, _ = digits()
    x = x.flatten(1)
    model = VectorQuantized()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    for (images,) in batches(x, size=128, steps=300):
        painted, encoded, chosen, straight = model(images)
        codebook_loss = F.mse_loss(chosen if on_chosen else straight, encoded.detach())
        commitment = F.mse_loss(encoded, chosen.detach())
        loss = F.mse_loss(painted, images) + 0.25 * codebook_loss + commitment
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=images)
    return model, x


@case(
    fault="no-gradient",
    also=("dead-layer", "not-optimized"),
    layers=("codebook",),
    onset=0,
    tolerate=("learning-rate-too-high",),
    source=(
        "https://github.com/showlab/Olaf-World/issues/8, https://github.com/EdoardoBotta/RQ-VAE-Recommender/issues/24"
    ),
    tags=("vq-vae",),
)
def vq_codebook_loss_on_output(attach: Attach) -> None:
    """The codebook's loss is computed on the straight-through output, where the codes are behind a detach()."""
    train_codebook(attach, on_chosen=False)


@case(source="https://github.com/showlab/Olaf-World/issues/8", tags=("vq-vae", "twin"))
def vq_codebook_loss_on_output_fixed(attach: Attach) -> None:
    """The codebook's loss is computed on the codes that were chosen."""
    model, x = train_codebook(attach, on_chosen=True)
    with torch.no_grad():
        assert F.mse_loss(model(x)[0], x) < 0.6 * x.var(0).mean()


@case(
    fault="missing-zero-grad",
    also=("learning-rate-too-high",),
    tolerate=("oscillating-gradient", "exploding-gradient"),
    onset=1,
    source=(
        "https://github.com/Project-MONAI/GenerativeModels/issues/102 (no zero_grad for the discriminator), "
        "https://github.com/Lightning-AI/pytorch-lightning/issues/591"
    ),
    tags=("gan",),
)
def gan_discriminator_never_zeroed(attach: Attach) -> None:
    """Only the generator's optimizer is zeroed; the discriminator keeps the gradients of all steps, its own and those
    that the generator's loss leaves in it.
    """
    setup(13)
    x, _ = digits()
    x = x.flatten(1) * 2 - 1
    generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    monitor = attach(discriminator, optimizer_d, loss_fn=criterion)
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
    for (real,) in batches(x, size=64, steps=250):
        optimizer_g.zero_grad()
        fake = generator(torch.randn(64, 16))
        criterion(discriminator(fake), ones).backward()
        optimizer_g.step()
        loss = 0.5 * (criterion(discriminator(real), ones) + criterion(discriminator(fake.detach()), zeros))
        loss.backward()
        optimizer_d.step()
        monitor.step(loss, batch=real)


@case(
    source="Gulrajani et al. 2017; https://github.com/soumith/ganhacks/issues/36 (what a critic's loss tells)",
    tags=("gan", "odd"),
    tolerate=("loss-plateau",),
)
def wgan_gradient_penalty_critic(attach: Attach) -> None:
    """The critic of a WGAN-GP: its loss starts near the penalty, falls far below zero and comes back towards it as the
    generator gets good.
    """
    setup(14)
    points, _ = make_moons(2000, noise=0.04, random_state=14)
    data = 3 * torch.tensor(points, dtype=torch.float32)
    generator = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    optimizer_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    monitor = attach(critic, optimizer_c)
    for step, (real,) in enumerate(batches(data, size=128, steps=1200)):
        fake = generator(torch.randn(128, 4)).detach()
        mix = torch.rand(128, 1)
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
        loss = critic(fake).mean() - critic(real).mean() + 2 * penalty
        optimizer_c.zero_grad()
        loss.backward()
        optimizer_c.step()
        monitor.step(loss, batch=real)
        if step % 3 == 2:
            optimizer_g.zero_grad()
            (-critic(generator(torch.randn(128, 4))).mean()).backward()
            optimizer_g.step()
    with torch.no_grad():
        nearest = torch.cdist(generator(torch.randn(1000, 4)), data).min(1).values
    assert nearest.mean() < 0.6


class Coupling(nn.Module):
    """Scale and shift one coordinate by functions of the other."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first
        self.net = nn.Sequential(nn.Linear(1, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = x[:, self.first], x[:, 1 - self.first]
        scale, shift = self.net(kept[:, None]).unbind(1)
        scale = 2 * torch.tanh(scale)
        moved = moved * scale.exp() + shift
        pair = (kept, moved) if self.first == 0 else (moved, kept)
        return torch.stack(pair, 1), scale


class Flow(nn.Module):
    """A density of points, as a chain of couplings."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(i % 2) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        volume = torch.zeros(len(x))
        for coupling in self.couplings:
            x, scale = coupling(x)
            volume = volume + scale
        return volume - 0.5 * (x**2).sum(1) - math.log(2 * math.pi)


@case(source="Dinh et al. 2017, Real NVP; a density may exceed 1", tags=("flow", "odd"))
def flow_of_small_moons(attach: Attach) -> None:
    """The negative log-likelihood passes through zero and goes on falling, because the points lie close together."""
    setup(15)
    points, _ = make_moons(3000, noise=0.06, random_state=15)
    data = torch.tensor(points, dtype=torch.float32) * 0.2
    model = Flow()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer)
    losses = []
    for (x,) in batches(data, size=256, steps=350):
        loss = -model(x).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        monitor.step(loss, batch=x)
        losses.append(loss.item())
    assert losses[0] > 0 > sum(losses[-20:]) / 20 + 0.8
