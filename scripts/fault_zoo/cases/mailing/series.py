"""Speech and time series."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import draws, mean_of_last, waves
from scripts.fault_zoo.protocol import Attach, case

# --------------------------------------------------------------------------------------------- speech that is too fast


def utterances(count: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return features of spoken words, each (frames, 12), and their letters from 1 to 9. One in 30 is spoken fast."""
    generator = torch.Generator().manual_seed(seed)
    sounds = torch.randn(10, 12, generator=torch.Generator().manual_seed(0))
    spoken, written = [], []
    for _ in range(count):
        word = torch.randint(1, 10, (int(torch.randint(4, 8, (), generator=generator)),), generator=generator)
        fast = bool(torch.rand((), generator=generator) < 1 / 30)
        spans = torch.randint(3, 5, word.shape, generator=generator) if fast else torch.full(word.shape, 8)
        frames = sounds[torch.repeat_interleave(word, spans)]
        spoken.append(frames + 0.5 * torch.randn(frames.shape, generator=generator))
        written.append(word)
    return spoken, written


class Recognizer(nn.Module):
    """Two convolutions, each of which halves the frames, and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(12, 32, 3, stride=2, padding=1)
        self.second = nn.Conv1d(32, 32, 3, stride=2, padding=1)
        self.gru = nn.GRU(32, 32, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x.transpose(1, 2)))
        x = torch.relu(self.second(x))
        return self.head(self.gru(x.transpose(1, 2))[0]).log_softmax(2)


def train_recognizer(attach: Attach, *, repaired: bool) -> float:
    """Return the mean loss of the last 20 steps."""
    torch.manual_seed(301)
    spoken, written = utterances(400, seed=3)
    model = Recognizer()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    criterion = nn.CTCLoss(zero_infinity=repaired)
    monitor = attach(model, optimizer, loss_fn=criterion)
    losses = []
    for i in draws(400, size=16, steps=240):
        x = nn.utils.rnn.pad_sequence([spoken[j] for j in i.tolist()], batch_first=True)
        words = [written[j] for j in i.tolist()]
        lengths = torch.tensor([(len(spoken[j]) + 3) // 4 for j in i.tolist()])
        scores = model(x).transpose(0, 1)
        loss = criterion(scores, torch.cat(words), lengths, torch.tensor([len(word) for word in words]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)
        losses.append(loss.item())
    return mean_of_last(losses)


@case(
    fault="non-finite",
    also=("unstable-formula",),
    onset=3,
    source="https://github.com/ypwhs/captcha_break/issues/29",
    tags=("speech", "ctc"),
)
def ctc_of_fast_speech(attach: Attach) -> None:
    """Convolutions keep a quarter of the frames, and a few words are spoken so fast that they have more letters than
    frames: the CTC loss of their batches is infinite. Reported in https://github.com/ypwhs/captcha_break/issues/29,
    https://github.com/SeanNaren/warp-ctc/issues/29 and https://github.com/open-mmlab/mmocr/pull/159.
    """
    train_recognizer(attach, repaired=False)


@case(source="the repaired twin of `ctc_of_fast_speech`: zero_infinity=True", tags=("speech", "ctc", "twin"))
def ctc_without_infinity(attach: Attach) -> None:
    """Words that do not fit into their frames count nothing."""
    assert train_recognizer(attach, repaired=True) < 1.0


# ------------------------------------------------------------------------------------ a recurrent layer turned around


class WaveNamer(nn.Module):
    """Read a series and say which kind of wave it is."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 32, batch_first=batch_first)
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(x)
        return self.head(out[:, -1])


def train_waves(attach: Attach, *, repaired: bool) -> float:
    """Return the mean loss of the last 20 steps."""
    torch.manual_seed(302)
    x, kind = waves(1500, 20, seed=4)
    model = WaveNamer(batch_first=repaired)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    losses = []
    for i in draws(1500, size=48, steps=300):
        loss = criterion(model(x[i]), kind[i])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.step(loss, batch=x[i])
        losses.append(loss.item())
    return mean_of_last(losses)


@case(
    fault="loss-plateau",
    layers=("lstm",),
    onset=0,
    source="https://github.com/closeheat/pytorch-lstm-text-generation-tutorial/issues/3",
    tags=("time-series", "lstm"),
)
def lstm_along_the_batch(attach: Attach) -> None:
    """`batch_first=True` is missing: the LSTM runs from sample to sample instead of along time, and the head sees one
    value of each series. Reported in https://github.com/closeheat/pytorch-lstm-text-generation-tutorial/issues/3,
    https://github.com/AndersonJo/dqn-pytorch/issues/1 and https://github.com/pytorch/pytorch/issues/1538.
    """
    train_waves(attach, repaired=False)


@case(source="the repaired twin of `lstm_along_the_batch`: batch_first=True", tags=("time-series", "lstm", "twin"))
def lstm_along_time(attach: Attach) -> None:
    """The LSTM runs along time."""
    assert train_waves(attach, repaired=True) < 0.4


# --------------------------------------------------------------------------------------------- a reservoir of echoes


class EchoState(nn.Module):
    """A large random recurrent layer that is never trained, and a linear readout that is."""

    def __init__(self, size: int = 300) -> None:
        super().__init__()
        self.reservoir = nn.RNN(1, size, batch_first=True)
        weight = torch.randn(size, size) * (torch.rand(size, size) < 0.1)
        weight *= 0.95 / torch.linalg.eigvals(weight).abs().max()
        with torch.no_grad():
            self.reservoir.get_parameter("weight_hh_l0").copy_(weight)
            self.reservoir.get_parameter("weight_ih_l0").uniform_(-0.5, 0.5)
        self.reservoir.requires_grad_(False)
        self.readout = nn.Linear(size, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.reservoir(x)[0])


def mackey_glass(length: int) -> Tensor:
    """Return a chaotic series (Mackey & Glass 1977, delay 17), standardized."""
    values = [1.2] * 18
    for _ in range(length):
        late, now = values[-18], values[-1]
        values.append(now + 0.2 * late / (1 + late**10) - 0.1 * now)
    series = torch.tensor(values[18:])
    return (series - series.mean()) / series.std()


@case(source="Jaeger 2001, The echo state approach", tags=("time-series", "frozen", "odd"))
def echoes_of_a_random_layer(attach: Attach) -> None:
    """99 % of the parameters are random and frozen on purpose; a linear readout forecasts six steps ahead."""
    torch.manual_seed(303)
    series = mackey_glass(4000)
    model = EchoState()
    optimizer = torch.optim.Adam(model.readout.parameters(), lr=3e-3)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(250):
        start = torch.randint(0, 3800, (16,), generator=generator)
        window = series[start[:, None] + torch.arange(106)]
        forecast = model(window[:, :100, None])[:, 40:, 0]  # the first 40 steps wash the start out
        loss = F.mse_loss(forecast, window[:, 46:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=window)
        losses.append(loss.item())
    assert mean_of_last(losses) < 0.1
