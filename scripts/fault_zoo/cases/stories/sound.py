"""Speech: labels that are longer than the output, an attention that is not needed, and a state that was not saved."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.protocol import Attach, case

SOUNDS = torch.randn(9, 16, generator=torch.Generator().manual_seed(8))  # spectrum of each of 8 sounds; 0 is the blank


def utter(tempo: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a spectrogram (T, 16) of `count` sounds and the sounds. The tempo is in frames per sound."""
    sounds = torch.randint(1, 9, (1,), generator=generator)
    while len(sounds) < count:
        following = torch.randint(1, 9, (1,), generator=generator)
        if following != sounds[-1]:
            sounds = torch.cat([sounds, following])
    length = torch.randint(-1, 2, (count,), generator=generator) + tempo
    frames = SOUNDS[sounds].repeat_interleave(length, 0)
    return frames + 1.8 * torch.randn(frames.shape, generator=generator), sounds


def speakers(count: int, *, fast: float, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return utterances; a share `fast` of them is spoken at double speed."""
    generator = torch.Generator().manual_seed(seed)
    hurried = torch.rand(count, generator=generator) < fast
    lengths = torch.randint(4, 9, (count,), generator=generator)
    return [utter(torch.tensor(3 if h else 7), int(n), generator) for h, n in zip(hurried, lengths, strict=True)]


class Recognizer(nn.Module):
    """Two convolutions that keep one frame in four, and a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(16, 32, 3, stride=2, padding=1), nn.Conv1d(32, 32, 3, stride=2, padding=1)
        self.gru = nn.GRU(32, 32, bidirectional=True)
        self.head = nn.Linear(64, 9)

    def forward(self, x: Tensor) -> Tensor:
        """Return log probabilities (T / 4, N, 9) of spectrograms (N, T, 16)."""
        x = F.relu(self.conv2(F.relu(self.conv1(x.transpose(1, 2)))))
        return self.head(self.gru(x.permute(2, 0, 1))[0]).log_softmax(2)


def collate(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    frames, sounds = zip(*batch, strict=True)
    lengths = torch.tensor([(len(f) + 3) // 4 for f in frames])
    padded = nn.utils.rnn.pad_sequence(list(frames), batch_first=True)
    return padded, torch.cat(sounds), lengths, torch.tensor([len(s) for s in sounds])


def error_rate(model: nn.Module, utterances: list[tuple[Tensor, Tensor]]) -> float:
    """Return the share of utterances that are not recognized as a whole."""
    wrong = 0
    for frames, sounds in utterances:
        with torch.no_grad():
            best = torch.unique_consecutive(model(frames[None])[:, 0].argmax(1))
        wrong += best[best > 0].tolist() != sounds.tolist()
    return wrong / len(utterances)


@case(
    fault="non-finite",
    also=("unstable-formula",),
    onset=29,
    source="https://discuss.pytorch.org/t/best-practices-to-solve-nan-ctc-loss/151913",
    tags=("speech", "ctc", "data"),
)
def utterances_longer_than_the_output(attach: Attach) -> None:
    """A speech recognizer keeps one frame in four. In 2 of 600 utterances, which are spoken fast, fewer frames are left
    than there are labels. The CTC loss of the first of them is infinite at step 29, and all weights are NaN after it.
    Without these utterances, 8 % of new ones have an error.
    """
    torch.manual_seed(511)
    utterances = speakers(600, fast=0.005, seed=12)
    model = Recognizer()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CTCLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for _ in range(8):
        order = torch.randperm(len(utterances))
        for i in order.split(16)[:-1]:
            frames, sounds, input_lengths, label_lengths = collate([utterances[j] for j in i.tolist()])
            loss = criterion(model(frames), sounds, input_lengths, label_lengths)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=frames)


# ------------------------------------------------------------------------------------ a state that was not saved


def train_in_two_runs(attach: Attach, *, whole: bool) -> float:
    """Return the error rate on new utterances. The monitor sees the second run, as it would after a restart."""
    torch.manual_seed(512)
    utterances = speakers(1500, fast=0, seed=3)
    criterion = nn.CTCLoss()
    order = [int(i) for _ in range(6) for i in torch.randperm(len(utterances))]
    batches = [collate([utterances[i] for i in order[16 * k : 16 * k + 16]]) for k in range(420)]

    def start() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        model = Recognizer()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.03, betas=(0.95, 0.98))
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=420)

    def advance(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...]) -> Tensor:
        frames, sounds, input_lengths, label_lengths = batch
        loss = criterion(model(frames), sounds, input_lengths, label_lengths)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    model, optimizer, scheduler = start()
    for batch in batches[:300]:
        advance(model, optimizer, batch)
        scheduler.step()
    checkpoint = {"model": model.state_dict()}
    if whole:
        checkpoint |= {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}

    model, optimizer, scheduler = start()
    model.load_state_dict(checkpoint["model"])
    if whole:
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    monitor = attach(model, optimizer, loss_fn=criterion)
    for batch in batches[300:]:
        loss = advance(model, optimizer, batch)
        scheduler.step()
        monitor.step(loss, batch=batch[0])
    return error_rate(model, speakers(150, fast=0, seed=4))


@case(
    fault="learning-rate-too-high",
    also=("gradient-spike", "oscillating-gradient"),
    tolerate=("exploding-gradient", "loss-plateau"),
    onset=0,
    source="https://github.com/NVIDIA-NeMo/Speech/issues/389",
    tags=("speech", "ctc", "resume"),
)
def resumed_with_weights_only(attach: Attach) -> None:
    """A run is resumed after 300 of 420 updates from the weights alone. Adam begins without its moments, and the
    schedule with its highest rate, which is 5 times as high as where the first run was. The loss rises from 0.04 to
    0.2, and in the end it is 0.12, and 21 % of new utterances have an error.
    """
    train_in_two_runs(attach, whole=False)


@case(source="the repaired twin of `resumed_with_weights_only`", tags=("speech", "ctc", "resume", "twin"))
def resumed_with_the_whole_state(attach: Attach) -> None:
    """The states of the optimizer and the schedule are restored, too. The loss ends at 0.03, the error is 16 %."""
    assert train_in_two_runs(attach, whole=True) < 0.2


# ------------------------------------------------------------------------------------ an attention that is not needed

SYMBOLS, FRAMES_PER_SYMBOL, MELS = 12, 4, 12


def spoken(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return texts of 5 symbols and mel frames (N, 20, 12), which glide from the sound of a symbol to the next."""
    text = torch.randint(0, SYMBOLS, (count, 5), generator=generator)
    shapes = torch.randn(SYMBOLS, MELS, generator=torch.Generator().manual_seed(5))
    steps = shapes[text].repeat_interleave(FRAMES_PER_SYMBOL, 1)
    smooth = F.avg_pool1d(F.pad(steps.transpose(1, 2), (2, 2), mode="replicate"), 5, stride=1).transpose(1, 2)
    return text, smooth


class Tacotron(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, width)
        self.encoder = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.prenet = nn.Sequential(nn.Linear(MELS, 64), nn.BatchNorm1d(64), nn.ReLU())
        self.attention_rnn = nn.GRUCell(64 + width, width)
        self.attention = nn.ModuleDict(
            {"query": nn.Linear(width, 32), "memory": nn.Linear(width, 32), "score": nn.Linear(32, 1)}
        )
        self.decoder_rnn = nn.GRUCell(2 * width, width)
        self.mel = nn.Linear(2 * width, MELS)

    def forward(self, text: Tensor, mels: Tensor | None = None) -> Tensor:
        """Return mel frames; the previous frames are `mels`, or its own if there are none."""
        memory, _ = self.encoder(self.symbols(text))
        keys = self.attention["memory"](memory)
        frame, context = torch.zeros(len(text), MELS), torch.zeros(len(text), memory.shape[2])
        hidden, state = torch.zeros_like(context), torch.zeros_like(context)
        said = []
        for t in range(5 * FRAMES_PER_SYMBOL):
            hidden = self.attention_rnn(torch.cat([self.prenet(frame), context], 1), hidden)
            energy = self.attention["score"](torch.tanh(keys + self.attention["query"](hidden)[:, None]))
            context = (energy.softmax(1) * memory).sum(1)
            state = self.decoder_rnn(torch.cat([hidden, context], 1), state)
            said.append(self.mel(torch.cat([state, context], 1)))
            frame = said[-1] if mels is None else mels[:, t]
        return torch.stack(said, 1)


@case(
    fault="target-leakage",
    also=("train-eval-mismatch", "vanishing-gradient", "dead-layer"),
    tolerate=("overfitting",),
    onset=0,
    source="https://github.com/mozilla/TTS/issues/134",
    tags=("tts", "attention"),
)
def frames_copied_from_the_last(attach: Attach) -> None:
    """A decoder of speech sees the last true frame through a prenet with BatchNorm. Frames are much like the frames
    before them, so that the loss falls, but the attention does not learn where the text is. Speech without true frames
    has an error of 0.63; silence has 0.68. Dropout after the prenet brings it down to 0.35. No kind fits; an input that
    nearly gives the target away comes nearest.
    """
    torch.manual_seed(513)
    generator = torch.Generator().manual_seed(6)
    model = Tacotron()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    criterion = nn.L1Loss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for _ in range(330):
        text, mels = spoken(32, generator)
        loss = criterion(model(text, mels), mels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.step(loss, batch=text)
