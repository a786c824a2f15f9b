"""Text: a dropout that never ends, vectors that stay frozen, two tables that were one, and a limit without effect."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.forums.worlds import lines
from scripts.fault_zoo.cases.mailing.material import draws, excerpts, letters, mean_of_last
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ a dropout that never ends


class Dropout(nn.Module):
    """Set a share of the values to 0."""

    def __init__(self, rate: float, *, only_in_training: bool) -> None:
        super().__init__()
        self.rate, self.only_in_training = rate, only_in_training

    def forward(self, x: Tensor) -> Tensor:
        if self.only_in_training and not self.training:
            return x
        kept = (torch.rand_like(x) >= self.rate).float()
        return x * kept / (1 - self.rate)


class TopicReader(nn.Module):
    """Tell the topic of a line from the mean of its words."""

    def __init__(self, words: int, *, only_in_training: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 48, padding_idx=0)
        self.hidden = nn.Linear(48, 48)
        self.head = nn.Linear(48, 6)
        self.dropout = Dropout(0.5, only_in_training=only_in_training)

    def forward(self, ids: Tensor) -> Tensor:
        words = self.dropout(self.embedding(ids)).sum(1) / (ids > 0).sum(1, keepdim=True).clamp(min=1)
        return self.head(self.dropout(F.relu(self.hidden(words))))


def train_topics(attach: Attach, *, only_in_training: bool) -> tuple[float, float]:
    """Return the accuracy on new lines, and how often two predictions agree."""
    torch.manual_seed(361)
    ids, topic = lines()
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(2))
    ids, topic = ids[order], topic[order]
    cut = len(ids) * 4 // 5
    model = TopicReader(int(ids.max()) + 1, only_in_training=only_in_training)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = attach(model, optimizer, loss_fn=criterion)

    def evaluate() -> Tensor:
        model.eval()
        with torch.no_grad():
            scores = model(ids[cut:])
        model.train()
        return scores

    for step, i in enumerate(draws(cut, size=64, steps=300)):
        loss = criterion(model(ids[i]), topic[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        val_loss = criterion(evaluate(), topic[cut:]).item() if step % 25 == 0 else None
        monitor.step(loss, batch=ids[i], val_loss=val_loss)
    first, second = evaluate().argmax(1), evaluate().argmax(1)
    return (first == topic[cut:]).float().mean().item(), (first == second).float().mean().item()


@case(
    fault="train-eval-mismatch",
    layers=("dropout",),
    onset=0,
    source="https://github.com/explosion/thinc/pull/355",
    tags=("embedding", "dropout"),
)
def dropout_that_never_ends(attach: Attach) -> None:
    """The dropout of the library does not ask for the mode of its model: it drops half of the values in evaluations,
    too. Two predictions of a new line agree in 57 % of the cases.
    """
    train_topics(attach, only_in_training=False)


@case(source="the repaired twin of `dropout_that_never_ends`", tags=("embedding", "dropout", "twin"))
def dropout_that_ends(attach: Attach) -> None:
    """The dropout does nothing in an evaluation."""
    right, agree = train_topics(attach, only_in_training=True)
    assert agree == 1.0, agree
    assert right > 0.5, right


# ------------------------------------------------------------------------------------ a language model of letters


class Block(nn.Module):
    """A layer of a causal transformer, with room for an adapter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.adapter: nn.Module = nn.Identity()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.adapter(self.layer(x, src_mask=mask, is_causal=True))


class LetterModel(nn.Module):
    """A causal transformer over letters."""

    def __init__(self, alphabet: int, width: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(alphabet, width)
        self.position = nn.Parameter(0.02 * torch.randn(40, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, alphabet, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=self.position.dtype)
        hidden = self.embedding(ids) + self.position[: ids.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(self.norm(hidden))

    def loss(self, text: Tensor) -> Tensor:
        """Return the loss of the next letter."""
        return F.cross_entropy(self(text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten())


def train_letters(model: LetterModel, text: Tensor, *, steps: int) -> None:
    """Train a model on a text."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        loss = model.loss(excerpts(text, length=33, count=16, generator=generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ------------------------------------------------------------------------------------ vectors that stay frozen


class Adapter(nn.Module):
    """A narrow network around which the signal passes, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, 8), nn.Linear(8, width)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(F.relu(self.down(x)))


def train_adapter(model: LetterModel, *, alphabet: int, unfreeze: bool) -> None:
    """Freeze a model, give it vectors of its own for a new alphabet, and add adapters that are to be trained."""
    model.requires_grad_(False)
    width = model.position.shape[1]
    model.embedding = nn.Embedding(alphabet, width).requires_grad_(False)
    model.head = nn.Linear(width, alphabet, bias=False)
    for block in model.blocks:
        block.adapter = Adapter(width)
    model.embedding.train()
    if unfreeze:
        model.embedding.weight.requires_grad_()


def tune_adapters(attach: Attach, *, unfreeze: bool) -> tuple[float, float]:
    """Return how far the new vectors moved, and the loss at the end."""
    torch.manual_seed(362)
    text, alphabet = letters()
    model = LetterModel(alphabet)
    train_letters(model, text, steps=150)
    pairs = text[:-1:2] * alphabet + text[1::2]
    _, tokens = pairs.unique(return_inverse=True)
    vocabulary = int(tokens.max()) + 1
    train_adapter(model, alphabet=vocabulary, unfreeze=unfreeze)
    before = model.embedding.weight.detach().clone()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=5e-3)
    monitor = attach(model, optimizer)
    generator = torch.Generator().manual_seed(8)
    losses = []
    for _ in range(200):
        batch = excerpts(tokens, length=25, count=16, generator=generator)
        loss = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=batch)
        losses.append(loss.item())
    return (model.embedding.weight - before).abs().max().item(), mean_of_last(losses)


@case(
    fault="no-gradient",
    also=("not-optimized", "dead-layer"),
    layers=("embedding",),
    onset=0,
    source="https://github.com/adapter-hub/adapters/pull/655",
    tags=("transformer", "adapter"),
)
def new_vectors_in_train_mode(attach: Attach) -> None:
    """A model is frozen, and gets adapters and new vectors for a vocabulary of pairs of letters. The vectors are to be
    trained, but `train()` sets their mode and unfreezes nothing: they stay random. The loss is 4.4 at the end, and 4.1
    in the twin.
    """
    tune_adapters(attach, unfreeze=False)


@case(source="the repaired twin of `new_vectors_in_train_mode`", tags=("transformer", "adapter", "twin"))
def new_vectors_that_learn(attach: Attach) -> None:
    """The new vectors are unfrozen."""
    moved, loss = tune_adapters(attach, unfreeze=True)
    assert moved > 0.1, moved
    assert loss < 4.25, loss


# ------------------------------------------------------------------------------------ two tables that were one


def tie_weights(model: LetterModel) -> None:
    """Let the last layer begin with the vectors of the letters."""
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())


def train_tied(attach: Attach) -> float:
    """Return how far the last layer is from the vectors of the letters at the end."""
    torch.manual_seed(363)
    text, alphabet = letters()
    model = LetterModel(alphabet)
    nn.init.normal_(model.embedding.weight, std=0.05)
    tie_weights(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    generator = torch.Generator().manual_seed(9)
    for _ in range(200):
        batch = excerpts(text, length=33, count=16, generator=generator)
        loss = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=batch)
    return (model.head.weight - model.embedding.weight).abs().max().item()


@case(
    fault="poor-initialization",
    onset=0,
    source="https://github.com/facebookresearch/pytext/pull/704",
    tags=("transformer", "tied"),
)
def two_tables_that_were_one(attach: Attach) -> None:
    """The option to tie the last layer to the vectors of the letters copies their values instead. Both tables are
    trained, and drift apart. The model learns. No kind fits; the copy is made before the first step.
    """
    train_tied(attach)


# ------------------------------------------------------------------------------------ moments in bfloat16


def tune_in_bfloat16(attach: Attach, *, full_weights: bool) -> tuple[float, float]:
    """Return the loss on another text before the training and after it."""
    torch.manual_seed(364)
    text, alphabet = letters()
    model = LetterModel(alphabet)
    train_letters(model, text[:40_000], steps=200)
    other = text[60_000:100_000].flip(0)
    if not full_weights:
        model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    monitor = attach(model, optimizer)
    generator = torch.Generator().manual_seed(10)
    fixed = excerpts(other, length=33, count=64, generator=generator)
    with torch.no_grad():
        before = model.loss(fixed).item()
    for _ in range(250):
        batch = excerpts(other, length=33, count=16, generator=generator)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=full_weights):
            loss = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=batch)
    with torch.no_grad():
        return before, model.loss(fixed).item()


@case(
    fault="not-optimized",
    also=("learning-rate-too-low", "loss-plateau"),
    onset=0,
    source="https://github.com/NVIDIA-NeMo/RL/issues/13",
    tags=("transformer", "bfloat16"),
)
def moments_in_bfloat16(attach: Attach) -> None:
    """A model is tuned in bfloat16, and so are the moments of its optimizer. An update is smaller than half the
    distance between two numbers near most weights, and is lost. The loss on the new text falls by 0.1, and by 0.7 in
    the twin.
    """
    tune_in_bfloat16(attach, full_weights=False)


@case(source="the repaired twin of `moments_in_bfloat16`", tags=("transformer", "bfloat16", "twin"))
def moments_in_float32(attach: Attach) -> None:
    """Weights and moments are in float32; only the products are in bfloat16."""
    before, after = tune_in_bfloat16(attach, full_weights=True)
    assert after < before - 0.4, (before, after)


# ------------------------------------------------------------------------------------ a limit without effect


class Recurrent(nn.Module):
    """A recurrent network that predicts the next letter."""

    def __init__(self, alphabet: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(alphabet, 48)
        self.rnn = nn.RNN(48, 96, batch_first=True)
        self.head = nn.Linear(96, alphabet)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(ids))[0])


def clipped(gradients: list[Tensor], limit: float) -> list[Tensor]:
    """Return gradients whose common norm is at most `limit`."""
    norm = torch.stack([g.norm() for g in gradients]).norm()
    return [g * (limit / norm.clamp(min=limit)) for g in gradients]


def train_clipped(attach: Attach, *, applied: bool) -> float:
    """Return the mean loss of the last 20 steps."""
    torch.manual_seed(365)
    text, alphabet = letters()
    model = Recurrent(alphabet)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=4.0)
    monitor = attach(model, optimizer)
    generator = torch.Generator().manual_seed(11)
    losses = []
    for _ in range(300):
        batch = excerpts(text, length=41, count=16, generator=generator)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in parameters if p.grad is not None]
        limited = clipped(gradients, limit=0.25)
        for p, gradient in zip(parameters, limited if applied else gradients, strict=True):
            p.grad = gradient
        optimizer.step()
        monitor.step(loss, batch=batch)
        losses.append(loss.item())
    return mean_of_last(losses)


@case(
    fault="learning-rate-too-high",
    also=("exploding-gradient", "loss-plateau", "saturated-activation", "oscillating-gradient"),
    tolerate=("gradient-spike", "vanishing-gradient", "dead-layer"),
    onset=0,
    source="https://github.com/NVIDIA/OpenSeq2Seq/pull/192",
    tags=("rnn", "clipping"),
)
def limit_without_effect(attach: Attach) -> None:
    """The gradients are limited to a norm of 0.25, and the ones without the limit are applied. The rate is made for
    the limit: the loss is above 20 for a while and 5.7 at the end, and 1.9 in the twin.
    """
    train_clipped(attach, applied=False)


@case(source="the repaired twin of `limit_without_effect`", tags=("rnn", "clipping", "twin"))
def limit_with_effect(attach: Attach) -> None:
    """The limited gradients are applied."""
    assert train_clipped(attach, applied=True) < 2.2
