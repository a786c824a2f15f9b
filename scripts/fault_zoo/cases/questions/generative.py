"""Generative models: a flow with a wrong sign, a latent that nobody reads, and scores of noisy moons."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import make_moons
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import excerpts, letters
from scripts.fault_zoo.protocol import Attach, case


def moons(count: int, seed: int) -> Tensor:
    points = torch.tensor(make_moons(count, noise=0.06, random_state=seed)[0], dtype=torch.float32)
    return (points - torch.tensor([0.5, 0.25])) / torch.tensor([0.87, 0.5])


# ------------------------------------------------------------------------------------ the sign of the volume


class Coupling(nn.Module):
    """Shift and scale one coordinate by functions of the other one."""

    def __init__(self, changed: int) -> None:
        super().__init__()
        self.changed = changed
        last = nn.Linear(64, 2)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), last)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = x[:, 1 - self.changed, None], x[:, self.changed, None]
        shift, scale = self.net(kept).chunk(2, 1)
        moved = moved * scale.exp() + shift
        pair = [moved, kept] if self.changed == 0 else [kept, moved]
        return torch.cat(pair, 1), scale.squeeze(1)


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(i % 2) for i in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        log_det = torch.zeros(len(x))
        for coupling in self.couplings:
            x, change = coupling(x)
            log_det = log_det + change
        return x, log_det


def train_flow(attach: Attach, *, sign: float) -> float:
    """Return the mean log-likelihood of new points. A single Gaussian reaches -2.8."""
    torch.manual_seed(111)
    data = moons(4000, seed=1)
    model = Flow()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer)
    normal = torch.distributions.Normal(0.0, 1.0)
    for _ in range(400):
        x = data[torch.randint(0, 4000, (128,))]
        z, log_det = model(x)
        loss = -(normal.log_prob(z).sum(1) + sign * log_det).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)
    with torch.no_grad():
        z, log_det = model(moons(1000, seed=2))
        return (normal.log_prob(z).sum(1) + log_det).mean().item()


@case(
    fault="exploding-gradient",
    tolerate=("learning-rate-too-high", "gradient-spike", "layer-imbalance", "saturated-activation", "non-finite"),
    onset=0,
    source="https://github.com/VincentStimper/normalizing-flows/issues/27",
    tags=("flow", "loss"),
)
def volume_with_the_wrong_sign(attach: Attach) -> None:
    """The logarithm of the determinant is subtracted from the likelihood instead of added: the flow shrinks all points
    to one, and the loss falls without end. The sign is asked about in
    https://github.com/VincentStimper/normalizing-flows/issues/27 and
    https://github.com/ikostrikov/pytorch-flows/issues/16.
    """
    train_flow(attach, sign=-1.0)


@case(source="the repaired twin of `volume_with_the_wrong_sign`: added", tags=("flow", "twin"))
def volume_with_the_right_sign(attach: Attach) -> None:
    """The logarithm of the determinant is added."""
    assert train_flow(attach, sign=1.0) > -2.3


# ------------------------------------------------------------------------------------ a latent that nobody reads


class TextAutoencoder(nn.Module):
    """A GRU reads 24 letters into a Gaussian, and another one writes them again, with the true letters before."""

    def __init__(self, alphabet: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(alphabet + 1, 32)
        self.encoder = nn.GRU(32, 64, batch_first=True)
        self.to_gauss = nn.Linear(64, 2 * 16)
        self.from_latent = nn.Linear(16, 96)
        self.decoder = nn.GRU(32, 96, batch_first=True)
        self.head = nn.Linear(96, alphabet)
        self.blank = alphabet

    def forward(self, ids: Tensor, dropped: float) -> tuple[Tensor, Tensor]:
        """Return the scores of the letters and the divergence of each text."""
        _, state = self.encoder(self.embedding(ids))
        mean, log_var = self.to_gauss(state[0]).chunk(2, 1)
        latent = mean + torch.exp(log_var / 2) * torch.randn_like(mean)
        divergence = 0.5 * (mean**2 + log_var.exp() - 1 - log_var).sum(1)
        given = F.pad(ids[:, :-1], (1, 0), value=self.blank)
        given = torch.where(torch.rand(given.shape) < dropped, self.blank, given)
        hidden, _ = self.decoder(self.embedding(given), torch.tanh(self.from_latent(latent))[None])
        return self.head(hidden), divergence


def train_text_autoencoder(attach: Attach, *, annealed: bool) -> float:
    """Return the mean divergence of the last step, in nats: how much the latent says about the text."""
    torch.manual_seed(112)
    ids, alphabet = letters()
    model = TextAutoencoder(alphabet)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer)
    generator = torch.Generator().manual_seed(3)
    told = 0.0
    for step in range(400):
        text = excerpts(ids, length=24, count=32, generator=generator)
        scores, divergence = model(text, 0.6 if annealed else 0.0)
        error = F.cross_entropy(scores.flatten(0, 1), text.flatten(), reduction="sum") / len(text)
        loss = error + (0.2 * min(1.0, step / 300) if annealed else 1.0) * divergence.mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        monitor.step(loss, batch=text)
        told = divergence.mean().item()
    return told


@case(
    fault="dead-layer",
    also=("vanishing-gradient", "no-gradient"),
    layers=("encoder", "to_gauss", "from_latent"),
    onset=20,
    source="https://github.com/molecularsets/moses/issues/45",
    tags=("vae", "text"),
)
def latent_that_nobody_reads(attach: Attach) -> None:
    """The divergence counts in full from the first step, and the decoder sees all letters before: it learns to do
    without the latent, the divergence goes to zero, and the encoder has nothing left to learn. Reported in
    https://github.com/molecularsets/moses/issues/45, https://github.com/jxhe/vae-lagging-encoder/issues/5,
    https://github.com/yanggeng1995/vae_tacotron/issues/10 and https://github.com/Mathux/ACTOR/issues/5.
    """
    train_text_autoencoder(attach, annealed=False)


# ------------------------------------------------------------------------------------ an odd recipe


@case(source="Song and Ermon 2019, Generative Modeling by Estimating Gradients, eq. 5 and 6", tags=("score", "odd"))
def scores_of_noisy_moons(attach: Attach) -> None:
    """A network learns the slope of the density of points with noise of ten sizes. Nearly all of the loss is noise that
    cannot be predicted, so that it stays near its first value while the samples get good.
    """
    torch.manual_seed(113)
    data = moons(4000, seed=1)
    sizes = torch.logspace(0.3, -1.2, 10)
    model = nn.Sequential(nn.Linear(3, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)

    def score(x: Tensor, size: Tensor) -> Tensor:
        return model(torch.cat([x / (1 + size), size.log()], 1)) / size

    for _ in range(1200):
        x = data[torch.randint(0, 4000, (128,))]
        size = sizes[torch.randint(0, 10, (128, 1))]
        noise = torch.randn_like(x)
        loss = ((size * score(x + size * noise, size) + noise) ** 2).sum(1).mean() / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)
    x = 2 * torch.randn(400, 2)
    with torch.no_grad():
        for size in sizes:
            for _ in range(30):
                step = 0.1 * size**2
                x = x + step * score(x, size.expand(400, 1)) + (2 * step).sqrt() * torch.randn_like(x)
    assert torch.cdist(x, data).min(1).values.mean() < 0.15
