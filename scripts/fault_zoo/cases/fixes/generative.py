"""Generators: pictures in another range, a judge with the wrong sign, a time that runs back, and codes of others."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws, mean_of_last
from scripts.fault_zoo.protocol import Attach, case


def perceptron(*widths: int) -> nn.Sequential:
    """Return linear layers with SiLU between them."""
    layers: list[nn.Module] = []
    for inner, outer in itertools.pairwise(widths):
        layers += [nn.Linear(inner, outer), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


# ------------------------------------------------------------------------------------ pictures in another range


class Autoencoder(nn.Module):
    """Codes of 8 numbers for pictures whose values are from -1 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = perceptron(64, 96, 8)
        self.decoder = nn.Sequential(perceptron(8, 96, 64), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def pretrain_autoencoder() -> Autoencoder:
    """Return an autoencoder that knows the digits."""
    x = 2 * digits()[0].flatten(1) - 1
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for i in draws(len(x), size=64, steps=400, seed=5):
        loss = F.mse_loss(model(x[i]), x[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.requires_grad_(False)


class Flow(nn.Module):
    """The speed with which a code moves on its way from noise."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(9, 96, 96, 8)

    def forward(self, code: Tensor, time: Tensor) -> Tensor:
        return self.net(torch.cat([code, time], 1))

    def sample(self, count: int) -> Tensor:
        """Return codes that are drawn in 20 steps."""
        code = torch.randn(count, 8)
        for step in range(20):
            code = code + self(code, torch.full((count, 1), step / 20)) / 20
        return code


def train_flow(attach: Attach, *, normalized: bool) -> float:
    """Return the share of black pixels in pictures that are drawn, less that in real ones."""
    torch.manual_seed(371)
    autoencoder = pretrain_autoencoder()
    x = digits()[0].flatten(1)
    codes = autoencoder.encoder(2 * x - 1 if normalized else x)
    scale = codes.std()
    codes = codes / scale
    model = Flow()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    for i in draws(len(codes), size=128, steps=400):
        noise, time = torch.randn(128, 8), torch.rand(128, 1)
        loss = F.mse_loss(model(noise + time * (codes[i] - noise), time), codes[i] - noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=codes[i])
    with torch.no_grad():
        drawn = autoencoder.decoder(scale * model.sample(400))
    return ((drawn < -0.8).float().mean() - (x < 0.1).float().mean()).item()


@case(
    fault="train-eval-mismatch",
    onset=0,
    source="https://github.com/mlcommons/training/pull/754",
    tags=("flow", "data"),
)
def latents_of_pictures_in_another_range(attach: Attach) -> None:
    """A model learns the codes of a pretrained autoencoder. The pictures go into the encoder with values from 0 to 1,
    and the autoencoder knows values from -1 to 1. The loss falls, and the pictures that are drawn are pale: 23 points
    fewer pixels are black than in real ones. The nearest kind is data that are not those of the pretraining.
    """
    train_flow(attach, normalized=False)


@case(source="the repaired twin of `latents_of_pictures_in_another_range`", tags=("flow", "data", "twin"))
def latents_of_pictures_in_their_range(attach: Attach) -> None:
    """The pictures are brought to the range of the autoencoder."""
    black = train_flow(attach, normalized=True)
    assert abs(black) < 0.1, black


# ------------------------------------------------------------------------------------ a judge with the wrong sign


def judge_objective(judge: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """Return what a judge is to maximize: the gap between real and enhanced pictures, less a penalty for its slope."""
    between = (real + torch.rand(len(real), 1) * (fake - real)).requires_grad_()
    (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
    return judge(real).mean() - judge(fake).mean() - 10 * ((slope.norm(dim=1) - 1) ** 2).mean()


class Enhancer(nn.Module):
    """Choose a gain and an offset for each picture."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(64, 32, 2)

    def forward(self, x: Tensor) -> Tensor:
        gain, offset = self.net(x).split(1, 1)
        return gain.exp() * x + offset


def train_enhancer(attach: Attach, *, maximize: bool) -> float:
    """Return the mean distance of enhanced pictures from the bright ones."""
    torch.manual_seed(372)
    bright = digits()[0].flatten(1)
    dark = 0.3 * bright + 0.1
    enhancer = Enhancer()
    judge = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    painter = torch.optim.Adam(enhancer.parameters(), lr=5e-3, betas=(0.0, 0.9))
    optimizer = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.0, 0.9))
    monitor = attach(judge, optimizer)
    order = draws(len(bright), size=64, steps=400, seed=2)
    for step, i in enumerate(draws(len(dark), size=64, steps=400)):
        real, given = bright[next(order)], dark[i]
        objective = judge_objective(judge, real, enhancer(given).detach())
        loss = -objective if maximize else objective
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=real)
        if step % 4 == 3:
            enhanced = enhancer(given)
            painter.zero_grad()
            (0.1 * F.mse_loss(enhanced, given) - judge(enhanced).mean()).backward()
            painter.step()
    with torch.no_grad():
        return (enhancer(dark) - bright).abs().mean().item()


@case(
    fault="loss-plateau",
    also=("vanishing-gradient", "dead-layer"),
    tolerate=("layer-imbalance",),
    onset=10,
    source="https://github.com/mtics/deep-photo-enhancer/issues/7",
    tags=("gan", "sign"),
)
def judge_that_minimizes(attach: Attach) -> None:
    """The objective of the judge is to be maximized, and is minimized. The penalty for the slope becomes a reward, and
    the judge says the same of every picture: its loss stays at -10, and the enhancer learns nothing from it. The
    distance to the bright pictures is 0.22, and 0.04 in the twin.
    """
    train_enhancer(attach, maximize=False)


@case(source="the repaired twin of `judge_that_minimizes`", tags=("gan", "sign", "twin"))
def judge_that_maximizes(attach: Attach) -> None:
    """The loss of the judge is the negative objective."""
    distance = train_enhancer(attach, maximize=True)
    assert distance < 0.1, distance


# ------------------------------------------------------------------------------------ a time that runs back


class Schedule:
    """Noise levels whose logarithm is normal, and the time from 0, without noise, to 1."""

    def log_noise(self, time: Tensor, *, training: bool) -> Tensor:
        """Return the logarithm of the noise at a time."""
        if training:
            return -1.2 + 1.2 * torch.special.ndtri(1 - time)
        return torch.log(torch.tensor(0.002)) + time * torch.log(torch.tensor(80.0 / 0.002))


class Denoiser(nn.Module):
    """Two numbers without their noise, given what was observed of them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(4, 64, 64, 2)

    def forward(self, noisy: Tensor, log_noise: Tensor, seen: Tensor) -> Tensor:
        scale = 1 / (1 + (2 * log_noise).exp()).sqrt()
        return self.net(torch.cat([noisy * scale, log_noise / 4, seen], 1))


def train_posterior(attach: Attach) -> tuple[float, float]:
    """Return the loss at the end, and the correlation of time and noise in the schedule that is read from it."""
    torch.manual_seed(373)
    schedule, model = Schedule(), Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    losses = []
    for _ in range(300):
        theta = 0.5 * torch.randn(128, 2)
        seen = (theta**2).sum(1, keepdim=True) + 0.1 * torch.randn(128, 1)
        level = schedule.log_noise(torch.rand(128, 1).clamp(1e-3, 1 - 1e-3), training=True)
        noisy = theta + level.exp() * torch.randn(128, 2)
        error = (model(noisy, level, seen) - theta) ** 2
        loss = (error / (0.25 * (2 * level).exp() / (0.25 + (2 * level).exp()))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=noisy)
        losses.append(loss.item())
    time = torch.linspace(0.01, 0.99, 50)
    read = torch.stack([time, schedule.log_noise(time, training=True)])
    return mean_of_last(losses), torch.corrcoef(read)[0, 1].item()


@case(
    fault="loss-plateau",
    onset=0,
    source="https://github.com/bayesflow-org/bayesflow/pull/560",
    tags=("diffusion", "schedule"),
)
def time_that_runs_back(attach: Attach) -> None:
    """The schedule of the training has the most noise at time 0. Times are uniform, so that the training is the same;
    whoever reads the schedule gets times and noise levels that do not belong together. No kind fits.
    """
    train_posterior(attach)


# ------------------------------------------------------------------------------------ codes of others


class Vae(nn.Module):
    """Digits as 6 normal numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = perceptron(64, 96, 12), perceptron(6, 96, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        return self.decoder(code), mean, log_variance


def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Return the divergence of the codes from a standard normal distribution."""
    return 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1).mean()


def train_vae(attach: Attach) -> tuple[float, float]:
    """Return the divergence that the last validation reports, and that of the new pictures."""
    torch.manual_seed(374)
    x, _, new_x, _ = (part.flatten(1) if part.ndim > 1 else part for part in digits())
    model = Vae()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    reported, right = 0.0, 0.0
    for step, i in enumerate(draws(len(x), size=64, steps=300)):
        drawn, mean, log_variance = model(x[i])
        loss = 10 * ((drawn - x[i]) ** 2).sum(1).mean() + divergence(mean, log_variance)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        val_loss = None
        if step % 20 == 19:
            with torch.no_grad():
                new_drawn, *codes = model(new_x)
                kl_loss = divergence(mean, log_variance)
                val_loss = (10 * ((new_drawn - new_x) ** 2).sum(1).mean() + kl_loss).item()
                reported, right = kl_loss.item(), divergence(*codes).item()
        monitor.step(loss, batch=x[i], val_loss=val_loss)
    return reported, right


@case(
    fault="train-eval-mismatch",
    onset=19,
    source="https://github.com/Project-MONAI/tutorials/pull/2000",
    tags=("vae", "validation"),
)
def divergence_of_other_codes(attach: Attach) -> None:
    """The validation loss adds the divergence of the last batch of the training to the error of the new pictures. The
    training is right.
    """
    train_vae(attach)


# ------------------------------------------------------------------------------------ placeholders all alike


class Draftsman(nn.Module):
    """Draw a picture from four words."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 16)
        self.net = perceptron(64, 128, 64)

    def forward(self, vectors: Tensor) -> Tensor:
        return self.net(vectors.flatten(1))


def pretrain_draftsman() -> tuple[Draftsman, Tensor]:
    """Return a network that draws, and the pattern of each of 20 words at each place."""
    patterns = torch.randn(20, 4, 64)
    model = Draftsman(20)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(400):
        phrase = torch.randint(0, 20, (64, 4))
        loss = F.mse_loss(model(model.words(phrase)), patterns[phrase, torch.arange(4)].sum(1) / 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.requires_grad_(False), patterns


def invert_phrase(attach: Attach) -> tuple[float, float]:
    """Return the first loss and the mean of the last 20."""
    torch.manual_seed(375)
    model, patterns = pretrain_draftsman()
    phrase = torch.tensor([[3, 8, 11, 17]])
    wanted = patterns[phrase, torch.arange(4)].sum(1) / 2 + 0.1 * torch.randn(1, 64)
    placeholders = nn.Embedding(4, 16)
    with torch.no_grad():
        for row in placeholders.weight:
            row.copy_(model.words.weight[phrase[0, 0]])
    optimizer = torch.optim.AdamW(placeholders.parameters(), lr=5e-3)
    whole = nn.ModuleDict({"placeholders": placeholders, "draftsman": model})
    monitor = attach(whole, optimizer, loss_fn=F.mse_loss)
    losses = []
    for _ in range(200):
        target = wanted + 0.3 * torch.randn(8, 64)
        loss = F.mse_loss(model(placeholders.weight[None]).expand(8, -1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=target)
        losses.append(loss.item())
    return losses[0], mean_of_last(losses)


@case(
    fault="poor-initialization",
    layers=("placeholders",),
    onset=0,
    source="https://github.com/invoke-ai/invoke-training/pull/75",
    tags=("embedding", "frozen"),
)
def placeholders_all_alike(attach: Attach) -> None:
    """Four placeholders shall begin with the vectors of the four words of a phrase. All of them get the vector of its
    first word, and the search begins far from the picture: the loss is 1.6 at the start, and 0.3 at the end.
    """
    invert_phrase(attach)
