"""Players against each other, a diffusion, and two models whose loss says little."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws, mean_of_last
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------------------- two players


def zeros_and_ones() -> Tensor:
    """Return the pictures of two digits as vectors from -1 to 1."""
    x, y, _, _ = digits()
    return 2 * x[y < 2].flatten(1) - 1


class Players(nn.Module):
    """A generator of digits and a discriminator, which gives a logit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh()
        )
        self.discriminator = nn.Sequential(
            nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
        )

    @torch.no_grad()
    def distance(self, real: Tensor) -> float:
        """Return the mean distance of generated digits to the nearest real one."""
        return torch.cdist(self.generator(torch.randn(256, 8)), real).min(1).values.mean().item()


def train_players(attach: Attach, *, repaired: bool) -> float:
    """Return the distance of generated digits to real ones."""
    torch.manual_seed(31)
    real = zeros_and_ones()
    model = Players(64)
    makes = torch.optim.Adam(model.generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    judges = torch.optim.Adam(model.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    ones, zeros = torch.ones(32, 1), torch.zeros(32, 1)
    criterion = nn.BCEWithLogitsLoss()
    monitor = attach(model, [makes, judges])
    for i in draws(len(real), size=32, steps=400):
        fake = model.generator(torch.randn(32, 8))
        judges.zero_grad()
        loss_d = criterion(model.discriminator(real[i]), ones) + criterion(model.discriminator(fake.detach()), zeros)
        loss_d.backward()
        judges.step()
        makes.zero_grad()
        seen = fake if repaired else fake.detach()
        loss_g = criterion(model.discriminator(seen), ones)
        loss_g.backward()
        makes.step()
        monitor.step(loss_d.detach() + loss_g.detach(), batch=real[i])
    return model.distance(real)


@case(
    fault="no-gradient",
    also=("not-optimized",),
    tolerate=("loss-plateau", "vanishing-gradient", "dead-layer", "saturated-activation", "missing-zero-grad"),
    layers=("generator",),
    onset=0,
    source="https://github.com/nikhilsinghmus/image2reverb/issues/37",
    tags=("gan", "two-optimizers"),
)
def generator_that_hears_nothing(attach: Attach) -> None:
    """The generated pictures are detached in the step of the generator, too, which gets no gradient and stays as it
    was; the discriminator wins within a few steps. Reported in
    https://github.com/nikhilsinghmus/image2reverb/issues/37, https://github.com/wangle53/CSA-CDGAN/issues/5 and
    https://github.com/samet-akcay/skip-ganomaly/issues/5.
    """
    train_players(attach, repaired=False)


@case(
    source="the repaired twin of `generator_that_hears_nothing`: detached only for the discriminator",
    tags=("gan", "two-optimizers", "twin"),
    tolerate=("loss-plateau", "oscillating-gradient"),
)
def generator_that_hears(attach: Attach) -> None:
    """The generated pictures are detached in the step of the discriminator only."""
    assert train_players(attach, repaired=True) < 4.0


def train_minimax(attach: Attach, *, saturates: bool) -> float:
    """Return the distance of generated digits to real ones."""
    torch.manual_seed(32)
    real = zeros_and_ones()
    model = Players(256)
    makes = torch.optim.Adam(model.generator.parameters(), lr=2e-4)
    judges = torch.optim.Adam(model.discriminator.parameters(), lr=2e-3)
    ones, zeros = torch.ones(32, 1), torch.zeros(32, 1)
    criterion = nn.BCELoss()
    monitor = attach(model, [makes, judges])
    for i in draws(len(real), size=32, steps=400):
        fake = model.generator(torch.randn(32, 8))
        judges.zero_grad()
        loss_d = criterion(model.discriminator(real[i]).sigmoid(), ones)
        loss_d = loss_d + criterion(model.discriminator(fake.detach()).sigmoid(), zeros)
        loss_d.backward()
        judges.step()
        makes.zero_grad()
        found = model.discriminator(fake).sigmoid()
        loss_g = -criterion(found, zeros) if saturates else criterion(found, ones)
        loss_g.backward()
        makes.step()
        monitor.step(loss_d.detach() + loss_g.detach(), batch=real[i])
    return model.distance(real)


@case(
    fault="vanishing-gradient",
    also=("saturated-activation", "dead-layer", "no-gradient", "layer-imbalance"),
    tolerate=("loss-plateau", "learning-rate-too-high", "learning-rate-too-low", "unstable-formula"),
    onset=20,
    source="https://github.com/soumith/ganhacks/issues/36",
    tags=("gan", "two-optimizers"),
)
def discriminator_that_is_always_right(attach: Attach) -> None:
    """The discriminator is wide and learns ten times as fast, and the generator minimizes log(1 - D). Soon the sigmoid
    is at its end for all generated pictures, the loss of the discriminator is zero, and the generator gets nearly no
    gradient. Reported in https://github.com/soumith/ganhacks/issues/36, https://github.com/soumith/ganhacks/issues/67
    and https://github.com/MathiasGruber/SRGAN-Keras/issues/3.
    """
    train_minimax(attach, saturates=True)


# ---------------------------------------------------------------------------------------------- which noise to predict


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 64), nn.SiLU())
        self.entry = nn.Linear(64, 128)
        self.mix = nn.Linear(64, 128)
        self.rest = nn.Sequential(nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 64))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        turn = t[:, None] * 100 ** torch.linspace(0, 1, 8)
        when = self.time(torch.cat([turn.sin(), turn.cos()], 1))
        return self.rest(self.entry(x) + self.mix(when))


def train_noise(attach: Attach, *, repaired: bool) -> float:
    """Return the mean loss of the last 20 steps."""
    torch.manual_seed(33)
    data, _, _, _ = digits()
    x = 2 * data.flatten(1) - 1
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    generator = torch.Generator().manual_seed(0)

    def add_noise(clean: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        keep = torch.cos(t * math.pi / 2)[:, None]
        return keep * clean + (1 - keep**2).sqrt() * noise

    losses = []
    for i in draws(len(x), size=64, steps=300):
        t = torch.rand(len(i), generator=generator)
        noise = torch.randn(x[i].shape, generator=generator)
        noisy = add_noise(x[i], t, noise)
        if not repaired:  # a helper for the loss draws its own
            noise = torch.randn(x[i].shape, generator=generator)
        loss = F.mse_loss(model(noisy, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
        losses.append(loss.item())
    return mean_of_last(losses)


@case(
    fault="loss-plateau",
    onset=20,
    source="https://github.com/modelscope/DiffSynth-Studio/issues/1175",
    tags=("diffusion",),
)
def another_noise_to_predict(attach: Attach) -> None:
    """The noise that the model is to predict is drawn again and is not the noise that was added: there is nothing to
    learn, and the loss stays at 1. Reported in https://github.com/modelscope/DiffSynth-Studio/issues/1175, where a new
    version creates the noise a second time.
    """
    train_noise(attach, repaired=False)


@case(source="the repaired twin of `another_noise_to_predict`: the noise that was added", tags=("diffusion", "twin"))
def the_noise_that_was_added(attach: Attach) -> None:
    """The model predicts the noise that was added."""
    assert train_noise(attach, repaired=True) < 0.5


# ------------------------------------------------------------------------------------------------------- odd recipes


def rings(seed: int) -> Iterator[Tensor]:
    """Yield batches of 128 points on a noisy ring."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        turn = 2 * math.pi * torch.rand(128, generator=generator)
        radius = 1.2 + 0.1 * torch.randn(128, generator=generator)
        yield torch.stack([radius * turn.cos(), radius * turn.sin()], 1)


@case(
    source="Du & Mordatch 2019, Implicit generation and generalization in energy-based models, alg. 1",
    tags=("energy", "odd"),
)
def energies_of_a_ring(attach: Attach) -> None:
    """A network gives a low energy to data and a high one to samples, which walk down its own slope for 30 steps. The
    loss is the difference of both, hovers around zero and says nothing about how good the model is.
    """
    torch.manual_seed(34)
    model = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer)
    data = rings(seed=0)
    walkers = 4 * torch.rand(1024, 2) - 2
    for _ in range(300):
        points = next(data)
        chosen = torch.randint(0, 1024, (128,))
        start = torch.where(torch.rand(128, 1) < 0.05, 4 * torch.rand(128, 2) - 2, walkers[chosen])
        for _ in range(30):
            start.requires_grad_(True)
            (slope,) = torch.autograd.grad(model(start).sum(), start)
            start = (start - 0.5 * slope + 0.1 * torch.randn(128, 2)).detach()
        walkers[chosen] = start
        low, high = model(points), model(start)
        loss = low.mean() - high.mean() + 0.02 * (low.square().mean() + high.square().mean())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=points)
    with torch.no_grad():
        inside, outside = model(next(data)), model(4 * torch.rand(1000, 2) - 2)
    assert (inside[:, 0][:, None] < outside[:, 0][None]).float().mean() > 0.75


@case(
    source="Jang et al. 2017, Categorical reparameterization with Gumbel-softmax, sec. 2.2 and 4.2",
    tags=("vae", "discrete", "odd"),
)
def codes_that_get_harder(attach: Attach) -> None:
    """Digits are encoded in 16 choices of one in 8. The choices are one-hot with the gradient of a softmax, whose
    temperature falls from 2 to 0.5, so that the gradient gets noisier on purpose.
    """
    torch.manual_seed(35)
    data, _, test, _ = digits()
    x = data.flatten(1)
    model = nn.ModuleDict(
        {
            "encoder": nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128)),
            "decoder": nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64)),
        }
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    losses = []
    for step, i in enumerate(draws(len(x), size=64, steps=350)):
        logits = model["encoder"](x[i]).view(-1, 16, 8)
        code = F.gumbel_softmax(logits, tau=max(0.5, 2 * math.exp(-0.005 * step)), hard=True)
        rebuilt = F.binary_cross_entropy_with_logits(model["decoder"](code.flatten(1)), x[i], reduction="sum") / len(i)
        chance = logits.softmax(-1)
        information = (chance * (chance.clamp(min=1e-9).log() + math.log(8))).sum((1, 2)).mean()
        loss = rebuilt + 0.1 * information
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
        losses.append(loss.item())
    with torch.no_grad():
        code = F.one_hot(model["encoder"](test.flatten(1)).view(-1, 16, 8).argmax(-1), 8).float()
        error = (model["decoder"](code.flatten(1)).sigmoid() - test.flatten(1)).square().mean()
    assert error < 0.05
