"""Sequences: spoken words, letters with a recurrent network, gestures of any length, and genomes."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from scripts.fault_zoo.cases.mailing.material import draws, letters, mean_of_last
from scripts.fault_zoo.protocol import Attach, case

# ----------------------------------------------------------------------------------------------------- spoken words


def spoken(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return spectrograms of six words, (N, 20 bands, 32 frames). A word is three tones, one after the other."""
    words = torch.tensor([[2, 9, 15], [9, 2, 15], [15, 9, 2], [5, 12, 5], [12, 5, 12], [17, 17, 7]])
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 6, (count,), generator=generator)
    speaker = torch.randint(-1, 2, (count, 1), generator=generator)
    start = torch.randint(0, 8, (count, 1), generator=generator)
    frame = torch.arange(32) - start
    part = (frame // 8).clamp(0, 2)
    tone = words[label].gather(1, part) + speaker
    band = torch.arange(20)[None, :, None]
    voice = torch.exp(-((band - tone[:, None]) ** 2) / 2.0) * ((frame >= 0) & (frame < 24))[:, None]
    return 2 * voice + 0.4 * torch.randn(count, 20, 32, generator=generator), label


class Spotter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(20, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool1d(2),
            nn.Conv1d(32, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool1d(2),
        )
        self.head = nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).amax(2))


def train_spotter(attach: Attach, *, zeroes: bool) -> float:
    """Return the mean loss of the last 20 steps."""
    torch.manual_seed(41)
    x, y = spoken(1500, seed=1)
    model = Spotter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    losses = []
    for i in draws(1500, size=32, steps=250):
        loss = criterion(model(x[i]), y[i])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if zeroes:
            optimizer.zero_grad()
        monitor.step(loss, batch=x[i])
        losses.append(loss.item())
    return mean_of_last(losses)


@case(
    fault="missing-zero-grad",
    tolerate=("oscillating-gradient", "learning-rate-too-high", "loss-plateau", "dead-relu", "rising-sparsity"),
    onset=2,
    source="https://github.com/wenet-e2e/wekws/pull/73",
    tags=("speech",),
)
def spotter_of_words_never_zeroed(attach: Attach) -> None:
    """A network spots spoken words, gradients are clipped, and `zero_grad` is never called, so that each step goes
    along the sum of all gradients so far. Reported in https://github.com/wenet-e2e/wekws/pull/73,
    https://github.com/IDEA-Research/DN-DETR/issues/19 and https://github.com/meta-pytorch/torchforge/pull/71.
    """
    train_spotter(attach, zeroes=False)


# ----------------------------------------------------------------------------------------------- clipped too late


class Recurrent(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 48)
        self.lstm = nn.LSTM(48, 96, batch_first=True)
        self.head = nn.Linear(96, vocab)

    def forward(self, ids: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, state = self.lstm(self.embed(ids), state)
        return self.head(out), state


def train_recurrent(attach: Attach, *, repaired: bool) -> float:
    """Read letters with a rate of 20 and a limit of 0.25, as an old example does. Return the mean loss of 20 steps."""
    torch.manual_seed(42)
    ids, vocab = letters()
    streams = ids[: len(ids) // 16 * 16].view(16, -1)
    model = Recurrent(vocab)
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    state: tuple[Tensor, Tensor] | None = None
    losses = []
    for step in range(250):
        text = streams[:, 32 * step : 32 * step + 33]
        if state is not None:
            state = (state[0].detach(), state[1].detach())
        logits, state = model(text[:, :-1], state)
        loss = criterion(logits.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if repaired:
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        if not repaired:
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        monitor.step(loss, batch=text)
        losses.append(loss.item())
    return mean_of_last(losses)


@case(
    fault="learning-rate-too-high",
    also=("exploding-gradient", "oscillating-gradient", "gradient-spike"),
    tolerate=("saturated-activation", "vanishing-gradient", "layer-imbalance", "loss-plateau", "dead-layer"),
    onset=1,
    source="https://github.com/VGraphRNN/VGRNN/issues/4",
    tags=("rnn", "clipping"),
)
def clipped_after_the_step(attach: Attach) -> None:
    """The gradients are clipped when the optimizer has used them, so that the rate of 20, which the limit of 0.25 makes
    small, is far too large. Reported in https://github.com/VGraphRNN/VGRNN/issues/4,
    https://github.com/awslabs/graphstorm/issues/1366 and https://github.com/jongwook/onsets-and-frames/issues/24.
    """
    train_recurrent(attach, repaired=False)


@case(source="the repaired twin of `clipped_after_the_step`", tags=("rnn", "clipping", "twin"))
def clipped_before_the_step(attach: Attach) -> None:
    """The gradients are clipped before the step, and a rate of 20 is right."""
    assert train_recurrent(attach, repaired=True) < 2.6


# ------------------------------------------------------------------------------------------ padding is the last word

LONGEST = 150


def gestures(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return padded paths of a hand, (N, 150, 2), their lengths, and which of four gestures they are.

    All gestures are short, but a few recordings of other people are 150 steps long.
    """
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 4, (count,), generator=generator)
    length = torch.randint(8, 16, (count,), generator=generator)
    steps = torch.arange(LONGEST)
    share = (steps / length[:, None]).clamp(max=1)
    turn = 6.28 * share * torch.tensor([1.0, -1.0, 2.0, 0.0])[kind][:, None]
    path = torch.stack([turn.cos() + (kind == 3)[:, None] * share, turn.sin()], 2)
    path = path + 0.2 * torch.randn(count, LONGEST, 2, generator=generator)
    return path * (steps < length[:, None])[:, :, None], length, kind


class GestureNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 32, batch_first=True)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        out, _ = self.lstm(x)
        last = out[:, -1] if lengths is None else out[torch.arange(len(x)), lengths - 1]
        return self.head(last)


def train_gestures(attach: Attach, *, repaired: bool) -> float:
    """Return the mean loss of the last 20 steps."""
    torch.manual_seed(43)
    x, lengths, y = gestures(1200, seed=1)
    model = GestureNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    losses = []
    for i in draws(1200, size=32, steps=200):
        loss = criterion(model(x[i], lengths[i] if repaired else None), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
        losses.append(loss.item())
    return mean_of_last(losses)


@case(
    fault="loss-plateau",
    also=("vanishing-gradient", "dead-layer", "learning-rate-too-low"),
    layers=("lstm",),
    onset=0,
    source="https://github.com/HHTseng/video-classification/issues/39",
    tags=("rnn", "padding"),
)
def last_state_is_of_the_padding(attach: Attach) -> None:
    """Paths of about 12 steps are padded to 150, and the classifier reads the state after the padding, when the LSTM
    has forgotten the path; the gradient vanishes on the way back through the padding. Reported in
    https://github.com/HHTseng/video-classification/issues/39,
    https://github.com/keitakurita/practical-torchtext/issues/5 and
    https://github.com/bentrevett/pytorch-sentiment-analysis/issues/86.
    """
    train_gestures(attach, repaired=False)


@case(source="the repaired twin of `last_state_is_of_the_padding`", tags=("rnn", "padding", "twin"))
def last_state_is_of_the_path(attach: Attach) -> None:
    """The classifier reads the state after the last step of each path."""
    assert train_gestures(attach, repaired=True) < 0.3


# ------------------------------------------------------------------------------------- a plateau of the wrong kind


def genomes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return one-hot DNA, (N, 4, 80), half of it with a motif of eight bases, and 1 for the motif."""
    generator = torch.Generator().manual_seed(seed)
    bases = torch.randint(0, 4, (count, 80), generator=generator)
    label = torch.randint(0, 2, (count,), generator=generator)
    start = torch.randint(0, 72, (count, 1), generator=generator)
    motif = torch.tensor([0, 2, 2, 1, 3, 0, 1, 2]).expand(count, 8)
    planted = bases.scatter(1, start + torch.arange(8), motif)
    bases = torch.where(label[:, None] == 1, planted, bases)
    return F.one_hot(bases, 4).float().transpose(1, 2), label.float()


class MotifNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scan = nn.Conv1d(4, 32, 9, padding=4)
        self.head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.scan(x)).amax(2)).squeeze(1)


def train_motif(attach: Attach, *, mode: Literal["min", "max"]) -> float:
    """Return the mean loss of the last 20 steps. The validation is every five steps."""
    torch.manual_seed(44)
    x, y = genomes(3000, seed=1)
    test_x, test_y = genomes(500, seed=2)
    model = MotifNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = ReduceLROnPlateau(optimizer, mode, factor=0.2, patience=3)
    criterion = nn.BCEWithLogitsLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    losses = []
    for step, i in enumerate(draws(3000, size=32, steps=300)):
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 5 != 4:
            monitor.step(loss, batch=x[i])
            continue
        with torch.no_grad():
            val_loss = criterion(model(test_x), test_y)
        schedule.step(val_loss)
        monitor.step(loss, batch=x[i], val_loss=val_loss)
    return mean_of_last(losses)


@case(
    fault="learning-rate-too-low",
    also=("loss-plateau", "not-optimized"),
    onset=45,
    source="https://github.com/FunctionLab/selene/issues/115",
    tags=("genomics", "schedule"),
)
def plateau_in_the_wrong_direction(attach: Attach) -> None:
    """`ReduceLROnPlateau` is in mode `max` and is given the loss: as the loss falls, it cuts the rate by five every 20
    steps, and the training stands still before it has learned much. Reported in
    https://github.com/FunctionLab/selene/issues/115, https://github.com/md-mohaiminul/ViS4mer/issues/4 and
    https://github.com/facebookresearch/fairseq/issues/2205.
    """
    train_motif(attach, mode="max")


@case(source="the repaired twin of `plateau_in_the_wrong_direction`: mode `min`", tags=("genomics", "schedule", "twin"))
def plateau_in_the_right_direction(attach: Attach) -> None:
    """The rate is cut when the validation loss has stopped falling."""
    assert train_motif(attach, mode="min") < 0.15
