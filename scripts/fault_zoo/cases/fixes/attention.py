"""Attention: padding in the middle, positions that are multiplied, and tracks that know only their neighbors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws, mean_of_last
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ padding in the middle


def split_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """Return attention for each example apart, over its first `lengths` tokens. The rest of the result is 0."""
    rows = []
    for i, length in enumerate(lengths):
        row = F.scaled_dot_product_attention(query[i, :, :length], key[i, :, :length], value[i, :, :length])
        rows.append(F.pad(row, (0, 0, 0, query.shape[2] - length)))
    return torch.stack(rows)


class Painter(nn.Module):
    """Predict the noise in a picture of 16 tiles, given a text that is padded to the longest one of the batch."""

    def __init__(self, words: int = 20, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.tiles = nn.Linear(4, width)
        self.place = nn.Parameter(0.02 * torch.randn(16, width))
        self.time = nn.Linear(1, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.mix = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width)) for _ in range(2))
        self.back = nn.ModuleList(nn.Sequential(nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 4)

    def forward(self, tiles: Tensor, time: Tensor, text: Tensor) -> Tensor:
        picture = self.tiles(tiles) + self.place + self.time(time)[:, None]
        hidden = torch.cat([self.words(text), picture], 1)
        lengths = ((text > 0).sum(1) + 16).tolist()
        for qkv, mix, back in zip(self.qkv, self.mix, self.back, strict=True):
            query, key, value = qkv(self.norm(hidden)).unflatten(2, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            found = split_attention(query, key, value, lengths)
            hidden = hidden + found.transpose(1, 2).flatten(2)
            hidden = hidden + back(mix(hidden))
        return self.out(self.norm(hidden))[:, -16:]


def captions(labels: Tensor) -> list[list[int]]:
    """Return a text for each digit: one to six words, the last of which is the digit."""
    return [[11 + int(label) % 4] * (int(label) % 6) + [int(label) + 1] for label in labels]


def padded(texts: list[list[int]]) -> Tensor:
    """Return texts as one table, padded with 0 on the right."""
    longest = max(map(len, texts))
    return torch.tensor([text + [0] * (longest - len(text)) for text in texts])


def train_painter(attach: Attach) -> float:
    """Return by how much the prediction for a picture depends on the other pictures of its batch."""
    torch.manual_seed(391)
    x, y, _, _ = digits()
    tiles = F.unfold(2 * x - 1, 2, stride=2).transpose(1, 2)
    texts = captions(y)
    model = Painter()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    for i in draws(len(tiles), size=16, steps=250):
        noise, time = torch.randn(16, 16, 4), torch.rand(16, 1)
        noisy = torch.lerp(tiles[i], noise, time[:, None])
        loss = F.mse_loss(model(noisy, time, padded([texts[j] for j in i])), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=noisy)
    shortest = min(range(len(texts)), key=lambda j: len(texts[j]))
    longest = max(range(len(texts)), key=lambda j: len(texts[j]))
    both, time = tiles[[shortest, longest]], torch.full((2, 1), 0.5)
    with torch.no_grad():
        alone = model(both[:1], time[:1], padded([texts[shortest]]))
        together = model(both, time, padded([texts[shortest], texts[longest]]))[:1]
    return (alone - together).abs().max().item()


@case(
    fault="train-eval-mismatch",
    onset=0,
    source="https://github.com/kohya-ss/musubi-tuner/pull/413",
    tags=("transformer", "mask", "diffusion"),
)
def padding_in_the_middle(attach: Attach) -> None:
    """Attention is computed for each example up to its length, and the padding of the text is in front of the picture.
    In a batch of several texts the padding of the shorter ones is read, and the last tiles of their pictures are not.
    Alone, as in use, a picture is read as a whole. The model learns.
    """
    train_painter(attach)


# ------------------------------------------------------------------------------------ positions that are multiplied


def sines(length: int, width: int) -> Tensor:
    """Return a vector for each position."""
    rate = 10000 ** (torch.arange(0, width, 2) / width)
    angle = torch.arange(length)[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], 2).flatten(1)


class Induction(nn.Module):
    """Two layers of causal attention without anything else."""

    positions: Tensor

    def __init__(self, words: int, length: int, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.register_buffer("positions", sines(length, width))
        self.layers = nn.ModuleList(nn.MultiheadAttention(width, 2, batch_first=True) for _ in range(2))
        self.head = nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        hidden = self.embedding(ids) + self.positions
        for layer in self.layers:
            hidden = hidden + layer(hidden, hidden, hidden, attn_mask=mask, need_weights=False)[0]
        return self.head(hidden[:, -1])


def riddles(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sequences of 16 words whose last word was there before, and the word that came after it then."""
    ids = torch.stack([torch.randperm(30, generator=generator)[:16] for _ in range(count)])
    at = torch.randint(0, 14, (count,), generator=generator)
    rows = torch.arange(count)
    ids[:, -1] = ids[rows, at]
    return ids, ids[rows, at + 1]


def train_induction(attach: Attach) -> tuple[float, float]:
    """Return the mean loss of the last 20 steps, and how alike vectors of neighboring positions are."""
    torch.manual_seed(392)
    generator = torch.Generator().manual_seed(14)
    model = Induction(30, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    losses = []
    for _ in range(400):
        ids, after = riddles(64, generator)
        loss = F.cross_entropy(model(ids), after)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=ids)
        losses.append(loss.item())
    near = F.cosine_similarity(model.positions[:-1], model.positions[1:]).mean()
    return mean_of_last(losses), near.item()


@case(
    fault="poor-initialization",
    onset=0,
    source="https://github.com/goodfire-ai/spd/pull/88",
    tags=("transformer", "position"),
)
def positions_multiplied(attach: Attach) -> None:
    """The angles of the positions are multiplied by the powers of 10000 by which they should be divided, and turn by
    thousands of rounds from one position to the next. Vectors of positions next to each other have little in common: a
    similarity of 0.19 instead of 0.96. The model learns all the same.
    """
    train_induction(attach)


# ------------------------------------------------------------------------------------ negatives of one frame


class Appearance(nn.Module):
    """A vector of unit length for a noisy picture."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 16))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.net(x), dim=1)


def train_tracks(attach: Attach) -> float:
    """Return how often an object that comes back is told from the 60 objects of its film."""
    torch.manual_seed(393)
    objects = digits()[0][:60]
    model = Appearance()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    generator = torch.Generator().manual_seed(15)

    def frame(shown: Tensor) -> Tensor:
        return objects[shown] + 0.25 * torch.randn(len(shown), 1, 8, 8, generator=generator)

    for _ in range(300):
        shown = torch.randperm(60, generator=generator)[:3]
        before, now = model(frame(shown)), model(frame(shown))
        loss = F.cross_entropy(now @ before.T / 0.1, torch.arange(3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=now)
    everyone = torch.arange(60)
    with torch.no_grad():
        memory = F.normalize(torch.stack([model(frame(everyone)) for _ in range(8)]).mean(0), dim=1)
        return ((model(frame(everyone)) @ memory.T).argmax(1) == everyone).float().mean().item()


@case(
    fault="loss-plateau",
    onset=20,
    source="https://github.com/KainingYing/CTVIS/issues/15",
    tags=("contrastive", "negatives"),
)
def negatives_of_one_frame(attach: Attach) -> None:
    """An object is told from the two others of the frame before, instead of from a memory of all the objects of the
    film, which the code does not have. The loss is small early; 85 % of the objects are found again, and 90 % with a
    memory. No kind fits; the nearest is a loss that hardly falls any more.
    """
    train_tracks(attach)
