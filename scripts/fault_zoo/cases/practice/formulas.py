"""Formulas of a loss that have no value at one point."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.practice.processes import plucked_strings
from scripts.fault_zoo.cases.reports.material import digits, indices
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------------ the logarithm of silence


class Denoiser(nn.Module):
    """Two convolutions over time without biases: silence stays silence."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(1, 12, 9, padding=4, bias=False)
        self.outer = nn.Conv1d(12, 1, 9, padding=4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


def magnitude(sound: Tensor, floor: float) -> Tensor:
    """Return the magnitudes of a short-time Fourier transform; `floor` is added to their squares."""
    window = torch.hann_window(128)
    spectrum = torch.stft(sound.squeeze(1), 128, 32, window=window, center=False, return_complex=True)
    return (spectrum.real**2 + spectrum.imag**2 + floor).sqrt()


def train_denoiser(attach: Attach, *, repaired: bool) -> float:
    """Return the squared error on new sounds, as a fraction of the noise in them."""
    torch.manual_seed(0)
    clean, noisy = plucked_strings(240)
    noisy[173] = 0.0  # the microphone was muted
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer)
    chosen = indices(len(clean), 8, seed=1)
    floor = 1e-7 if repaired else 0.0
    for _ in range(120):
        i = next(chosen)
        out = model(noisy[i])
        found, wanted = magnitude(out, floor), magnitude(clean[i], floor)
        loss = (out - clean[i]).abs().mean() + 0.05 * F.l1_loss(found.log(), wanted.log())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=noisy[i])
    clean, noisy = plucked_strings(40, seed=8)
    with torch.no_grad():
        return (F.mse_loss(model(noisy), clean) / F.mse_loss(noisy, clean)).item()


@case(
    fault="non-finite",
    also=("unstable-formula",),
    onset=0,
    source="https://github.com/csteinmetz1/auraloss/issues/63",
    tags=("audio", "conv"),
)
def logarithm_of_silence(attach: Attach) -> None:
    """A spectral loss takes the logarithm of magnitudes without a floor, and for one of 240 recordings the microphone
    was muted. Its batch comes in the first epoch. Reported in https://github.com/csteinmetz1/auraloss/issues/63.
    """
    train_denoiser(attach, repaired=False)


@case(source="the repaired twin of `logarithm_of_silence`: the squares have a floor", tags=("audio", "conv"))
def logarithm_with_a_floor(attach: Attach) -> None:
    """For one of the recordings the input is silent, so that its logarithms are far below all others."""
    assert train_denoiser(attach, repaired=True) < 0.5


# ------------------------------------------------------------------------------------------ a weight at the last step


class NoisePredictor(nn.Module):
    """Say which noise is in a noisy digit at a time of the diffusion."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.when = nn.Embedding(times, 64)
        self.net = nn.Sequential(nn.Linear(128, 192), nn.SiLU(), nn.Linear(192, 192), nn.SiLU(), nn.Linear(192, 64))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net(torch.cat([x, self.when(t)], 1))


def train_diffusion(attach: Attach, *, repaired: bool) -> float:
    """Return the squared error of the predicted velocity over all times."""
    torch.manual_seed(0)
    x = 2 * digits()[0] - 1
    times = 400
    kept = torch.cos(torch.linspace(0, 1, times) * torch.pi / 2) ** 2  # of the variance; none at the end
    kept[0], kept[-1] = 0.9999, 0.0  # rescaled to an end without signal: arXiv:2305.08891
    ratio = kept / (1 - kept)
    model = NoisePredictor(times)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    chosen = indices(len(x), 16)

    def losses(i: Tensor, t: Tensor) -> Tensor:
        noise = torch.randn_like(x[i])
        signal_frac, noise_frac = kept[t].sqrt()[:, None], (1 - kept[t]).sqrt()[:, None]
        velocity = signal_frac * noise - noise_frac * x[i]
        return ((model(signal_frac * x[i] + noise_frac * noise, t) - velocity) ** 2).mean(1)

    for _ in range(300):
        i = next(chosen)
        t = torch.randint(times, (len(i),))
        weight = ratio[t].clamp(max=5) / (ratio[t] + 1 if repaired else ratio[t])
        loss = (weight * losses(i, t)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        return losses(torch.arange(len(x)), torch.randint(times, (len(x),))).mean().item()


@case(
    fault="non-finite",
    also=("unstable-formula",),
    onset=0,
    source="https://github.com/TiankaiHang/Min-SNR-Diffusion-Training/issues/2",
    tags=("diffusion", "digits"),
)
def weight_of_the_last_noise(attach: Attach) -> None:
    """The loss of a diffusion is divided by the ratio of signal to noise, which is zero at the last of 400 times: when
    that time is drawn, its weight is 0 / 0. Reported in
    https://github.com/TiankaiHang/Min-SNR-Diffusion-Training/issues/2.
    """
    train_diffusion(attach, repaired=False)
