"""Autoencoders and diffusion."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws, mean_of_last
from scripts.fault_zoo.protocol import Attach, case


class Autoencoder(nn.Module):
    """A variational autoencoder of digits."""

    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2 * dim))
        self.decoder = nn.Sequential(nn.Linear(dim, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + (0.5 * log_var).exp() * torch.randn_like(mean)), mean, log_var


def divergence(mean: Tensor, log_var: Tensor) -> Tensor:
    """Return the divergence from the prior, summed over the batch."""
    return -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum()


def lost_frac(model: Autoencoder) -> float:
    """Return the squared error on test digits, as a fraction of their variance."""
    _, _, test_x, _ = digits()
    test_x = test_x.flatten(1)
    with torch.no_grad():
        return (F.mse_loss(model(test_x)[0], test_x) / test_x.var(0).mean()).item()


# ------------------------------------------------------------------------------------------------ a sum and a mean


def train_autoencoder(attach: Attach, *, repaired: bool) -> float:
    """Return the squared error on test digits, as a fraction of their variance."""
    torch.manual_seed(701)
    x = digits()[0].flatten(1)
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    for i in draws(len(x), size=64, steps=300):
        out, mean, log_var = model(x[i])
        error = 10 * (out - x[i]).square()
        if repaired:
            loss = (error.sum() + divergence(mean, log_var)) / len(i)
        else:
            loss = error.mean() + divergence(mean, log_var)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    return lost_frac(model)


@case(
    fault="loss-plateau",
    also=("oscillating-gradient", "layer-imbalance", "dead-layer", "vanishing-gradient"),
    onset=0,
    source="https://github.com/zdebruine/MMVAE/pull/19",
    tags=("vae",),
)
def divergence_summed_error_averaged(attach: Attach) -> None:
    """The divergence is summed over the batch and the error is averaged over batch and pixels: the code is drowned in
    the prior, and every picture becomes the mean picture. Reported in https://github.com/zdebruine/MMVAE/pull/19; the
    same imbalance is in https://github.com/AppliedDataSciencePartners/WorldModels/issues/12. The posterior has
    collapsed: no more than a constant is learned, and one of two losses drowns the other.
    """
    train_autoencoder(attach, repaired=False)


@case(source="the repaired twin of `divergence_summed_error_averaged`: both are summed", tags=("vae", "twin"))
def divergence_and_error_summed(attach: Attach) -> None:
    """Error and divergence are summed over pixels and dimensions, and averaged over the batch."""
    assert train_autoencoder(attach, repaired=True) < 0.7


@case(source="Bowman et al. 2016, sec. 3.1; Sønderby et al. 2016", tags=("vae", "odd"))
def divergence_that_counts_later(attach: Attach) -> None:
    """The weight of the divergence rises from 0 to 1, so that the loss falls at first, and then rises by plan."""
    torch.manual_seed(702)
    x = digits()[0].flatten(1)
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer)
    for step, i in enumerate(draws(len(x), size=64, steps=360)):
        out, mean, log_var = model(x[i])
        weight = min(1.0, max(0.0, (step - 60) / 240))
        loss = (10 * F.mse_loss(out, x[i], reduction="sum") + weight * divergence(mean, log_var)) / len(i)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    assert lost_frac(model) < 0.7


# ------------------------------------------------------------------------------------ an epsilon that is zero in halves


class NoiseModel(nn.Module):
    """Say which noise is in a noisy digit."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.when = nn.Embedding(times, 32)
        self.net = nn.Sequential(nn.Linear(96, 160), nn.ReLU(), nn.Linear(160, 160), nn.ReLU(), nn.Linear(160, 64))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net(torch.cat([x, self.when(t)], 1))


def train_halves(attach: Attach, *, repaired: bool) -> float:
    """Return the mean loss of the last 20 steps."""
    torch.manual_seed(703)
    x = (2 * digits()[0].flatten(1) - 1).half()
    kept = torch.cos(torch.linspace(0.02, 0.98, 100) * torch.pi / 2) ** 2
    model = NoiseModel(100).half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4 if repaired else 1e-8)
    monitor = attach(model, optimizer)
    losses = []
    for i in draws(len(x), size=64, steps=150):
        t = torch.randint(0, 100, (len(i),))
        noise = torch.randn(len(i), 64).half()
        noisy = kept[t].sqrt().half()[:, None] * x[i] + (1 - kept[t]).sqrt().half()[:, None] * noise
        loss = F.mse_loss(model(noisy, t).float(), noise.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=noisy)
        losses.append(loss.item())
    return mean_of_last(losses)


@case(
    fault="non-finite",
    also=("fp16-underflow", "unstable-formula"),
    onset=1,
    source="https://github.com/afiaka87/glide-finetune/issues/5",
    tags=("diffusion", "fp16"),
)
def noise_learned_in_halves(attach: Attach) -> None:
    """The whole model is in half precision. Adam's epsilon of 1e-8 and small squared gradients are zero there, so that
    the first step divides by zero. Reported in https://github.com/afiaka87/glide-finetune/issues/5,
    https://github.com/pytorch/pytorch/issues/8860 and https://discuss.pytorch.org/t/adam-half-precision-nans/1765.
    """
    train_halves(attach, repaired=False)
