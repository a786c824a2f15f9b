"""Text: topics, reversed words, tags of letters and word vectors, and a forecast that is weaned off its teacher."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.forums.worlds import lines
from scripts.fault_zoo.cases.mailing.material import draws
from scripts.fault_zoo.protocol import Attach, case


@lru_cache(None)
def split_lines() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return lines as word ids and their topics, for training and for testing."""
    ids, labels = lines()
    known = ids[:, 0] > 0
    ids, labels = ids[known], labels[known]
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(5))
    cut = len(ids) * 4 // 5
    return ids[order[:cut]], labels[order[:cut]], ids[order[cut:]], labels[order[cut:]]


# ------------------------------------------------------------------------------------ the mask means the opposite


class TopicEncoder(nn.Module):
    """Read a line behind a first token, whose vector tells the topic."""

    def __init__(self, words: int, *, inverted: bool) -> None:
        super().__init__()
        self.first = words
        self.embedding = nn.Embedding(words + 1, 48, padding_idx=0)
        self.position = nn.Parameter(0.1 * torch.randn(18, 48))
        layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(48, 6)
        self.inverted = inverted

    def forward(self, ids: Tensor) -> Tensor:
        ids = torch.cat([torch.full_like(ids[:, :1], self.first), ids, torch.zeros_like(ids[:, :1])], 1)
        attention_mask = ids != 0
        mask = attention_mask if self.inverted else ~attention_mask
        hidden = self.encoder(self.embedding(ids) + self.position, src_key_padding_mask=mask)
        return self.head(hidden[:, 0])


def train_topic_encoder(attach: Attach, *, inverted: bool) -> float:
    """Return the accuracy on lines for testing."""
    torch.manual_seed(71)
    ids, labels, test_ids, test_labels = split_lines()
    model = TopicEncoder(int(ids.max()) + 1, inverted=inverted)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    for i in draws(len(ids), size=32, steps=400):
        loss = F.cross_entropy(model(ids[i]), labels[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=ids[i])
    model.eval()
    with torch.no_grad():
        return (model(test_ids).argmax(1) == test_labels).float().mean().item()


@case(
    fault="loss-plateau",
    onset=0,
    source="https://github.com/lucidrains/halonet-pytorch/pull/6",
    tags=("transformer", "mask"),
)
def attention_to_the_padding_only(attach: Attach) -> None:
    """The mask is true where there is a word, as tokenizers make it. `src_key_padding_mask` is to be true where there
    is none, so that all tokens look at the padding. Reported in https://github.com/lucidrains/halonet-pytorch/pull/6
    and asked in https://stackoverflow.com/questions/62170439.
    """
    train_topic_encoder(attach, inverted=True)


@case(source="the repaired twin of `attention_to_the_padding_only`: the mask is inverted", tags=("mask", "twin"))
def attention_to_the_words(attach: Attach) -> None:
    """The mask is true where there is padding."""
    assert train_topic_encoder(attach, inverted=False) > 0.5


# ------------------------------------------------------------------------------------ the answer is the input

START, END = 26, 27


def words_and_mirrors(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return words of six letters, (N, 6), and the words from back to front with start and end, (N, 8)."""
    words = sorted(set(re.findall(r"\b[a-z]{6}\b", " ".join(topics.values()))))
    picked = torch.randint(0, len(words), (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    letters = torch.tensor([[ord(letter) - 97 for letter in words[i]] for i in picked])
    mirrored = torch.cat([torch.full((count, 1), START), letters.flip(1), torch.full((count, 1), END)], 1)
    return letters, mirrored


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(28, 64)
        self.target = nn.Embedding(28, 64)
        self.position = nn.Parameter(0.3 * torch.randn(8, 64))
        self.transformer = nn.Transformer(64, 4, 1, 1, 128, dropout=0.0, batch_first=True)
        self.head = nn.Linear(64, 28)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        read = self.source(source) + self.position[: source.shape[1]]
        written = self.target(target) + self.position[: target.shape[1]]
        return self.head(self.transformer(read, written, tgt_mask=mask))


def train_translator(attach: Attach, *, shifted: bool) -> float:
    """Return which part of the letters is right when the model writes new words on its own."""
    torch.manual_seed(72)
    source, target = words_and_mirrors(4000, seed=1)
    model = Translator()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(len(source), size=64, steps=500):
        given, wanted = (target[i, :-1], target[i, 1:]) if shifted else (target[i], target[i])
        output = model(source[i], given)
        loss = criterion(output.reshape(-1, 28), wanted.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=source[i])
    model.eval()
    source, target = words_and_mirrors(300, seed=2)
    written = torch.full((300, 1), START)
    with torch.no_grad():
        for _ in range(6):
            written = torch.cat([written, model(source, written)[:, -1:].argmax(2)], 1)
    return (written[:, 1:] == target[:, 1:-1]).float().mean().item()


@case(
    fault="target-leakage",
    onset=0,
    source="https://github.com/pytorch/tutorials/issues/719",
    tags=("seq2seq", "transformer"),
)
def decoder_that_copies_its_input(attach: Attach) -> None:
    """The decoder gets the word that it is to write, with a causal mask and without a shift: each place sees its own
    letter and copies it. The loss is zero soon, and the model cannot write. Reported in
    https://github.com/pytorch/tutorials/issues/719 and https://github.com/huggingface/transformers/issues/14089.
    """
    train_translator(attach, shifted=False)


@case(source="the repaired twin of `decoder_that_copies_its_input`", tags=("seq2seq", "transformer", "twin"))
def decoder_that_writes_the_next_letter(attach: Attach) -> None:
    """The input of the decoder ends one letter earlier, and its target starts one letter later."""
    assert train_translator(attach, shifted=True) > 0.8


# ------------------------------------------------------------------------------------ classes and places mixed up


@lru_cache(None)
def tagged_letters() -> tuple[Tensor, Tensor]:
    """Return the letters of the topics without spaces, and the tag of each: begin, inside, end, single or sign."""
    ids: list[int] = []
    tags: list[int] = []
    for word in re.findall(r"[a-z]+|[.,:()]", " ".join(topics[name] for name in sorted(topics)).lower()):
        if not word.isalpha():
            ids.append(26)
            tags.append(4)
            continue
        ids += [ord(letter) - 97 for letter in word]
        tags += [3] if len(word) == 1 else [0, *[1] * (len(word) - 2), 2]
    return torch.tensor(ids[:120_000]), torch.tensor(tags[:120_000])


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(27, 24)
        self.reader = nn.LSTM(24, 48, batch_first=True, bidirectional=True)
        self.head = nn.Linear(96, 5)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.reader(self.embedding(ids))
        return self.head(hidden)


def train_tagger(attach: Attach, *, permuted: bool) -> float:
    """Return the accuracy of the tags on text that was not read."""
    torch.manual_seed(73)
    ids, tags = tagged_letters()
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    generator = torch.Generator().manual_seed(1)
    for _ in range(250):
        start = torch.randint(0, 100_000, (32, 1), generator=generator) + torch.arange(32)
        logits = model(ids[start])
        # the loss expects (batch, classes, places)
        logits = logits.permute(0, 2, 1) if permuted else logits.view(32, 5, 32)
        loss = criterion(logits, tags[start])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=ids[start])
    with torch.no_grad():
        found = model(ids[110_000:].view(-1, 40)).argmax(2)
    return (found == tags[110_000:].view(-1, 40)).float().mean().item()


@case(
    fault="loss-plateau",
    onset=0,
    source="https://github.com/weirme/FCSN/issues/32",
    tags=("lstm", "shapes"),
)
def classes_and_places_mixed_up(attach: Attach) -> None:
    """The loss wants the classes in the second dimension, and `view` is used where `permute` is needed: the shapes
    are right and the numbers are in the wrong places. Reported in https://github.com/weirme/FCSN/issues/32,
    https://github.com/voiler/IMPALA/issues/3 and https://github.com/vitrioil/Speech-Separation/issues/4.
    """
    train_tagger(attach, permuted=False)


@case(source="the repaired twin of `classes_and_places_mixed_up`: `permute`", tags=("lstm", "shapes", "twin"))
def classes_before_places(attach: Attach) -> None:
    """The dimensions are permuted."""
    assert train_tagger(attach, permuted=True) > 0.75


# ------------------------------------------------------------------------------------ vectors that are frozen


@lru_cache(None)
def word_vectors(ids: int, size: int) -> Tensor:
    """Return vectors of the words, from which words share a line: the first components of the logarithms of counts."""
    present = torch.zeros(len(lines()[0]), ids).scatter_(1, lines()[0], 1.0)
    counts = present.T @ present
    u, s, _ = torch.linalg.svd(torch.log1p(counts))
    return u[:, :size] * s[:size].sqrt()


def train_word_vectors(attach: Attach, *, freeze: bool) -> float:
    """Return the accuracy on lines for testing."""
    torch.manual_seed(74)
    ids, labels, test_ids, test_labels = split_lines()
    words = nn.Embedding.from_pretrained(word_vectors(int(ids.max()) + 1, 6), freeze=freeze)
    head = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 6))
    model = nn.ModuleDict({"words": words, "head": head})
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)

    def read(lines_of_words: Tensor) -> Tensor:
        known = (lines_of_words > 0).float()[:, :, None]
        return head((words(lines_of_words) * known).sum(1) / known.sum(1))

    for i in draws(len(ids), size=32, steps=500):
        loss = F.cross_entropy(read(ids[i]), labels[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=ids[i])
    with torch.no_grad():
        return (read(test_ids).argmax(1) == test_labels).float().mean().item()


@case(
    fault="no-gradient",
    also=("not-optimized",),
    layers=("words",),
    onset=0,
    source="https://github.com/huggingface/optimum-graphcore/pull/304",
    tags=("embedding", "fine-tuning"),
)
def vectors_frozen_by_default(attach: Attach) -> None:
    """The word vectors shall be a start from which to learn. `nn.Embedding.from_pretrained` freezes them unless it is
    told not to. Reported in https://github.com/huggingface/optimum-graphcore/pull/304 and
    https://github.com/649453932/Chinese-Text-Classification-Pytorch/issues/117.
    """
    train_word_vectors(attach, freeze=True)


# ------------------------------------------------------------------------------------ an odd recipe


@case(source="Bengio et al. 2015, Scheduled Sampling, sec. 2.4", tags=("gru", "curriculum", "odd"))
def weaned_off_the_teacher(attach: Attach) -> None:
    """A GRU continues a wave. At first each of its inputs is the true value; later more and more are what it has
    forecast itself, so that the task gets harder and the loss rises by plan.
    """
    torch.manual_seed(75)
    cell, head = nn.GRUCell(1, 48), nn.Linear(48, 1)
    model = nn.ModuleDict({"cell": cell, "head": head})
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)

    def waves(count: int) -> Tensor:
        turn = torch.arange(40) / (6 + 10 * torch.rand(count, 1)) + torch.rand(count, 1)
        return torch.sin(2 * math.pi * turn) + 0.3 * torch.sin(4 * math.pi * turn)

    def forecast(wave: Tensor, truth: float) -> Tensor:
        hidden, value, found = torch.zeros(len(wave), 48), wave[:, :1], []
        for time in range(39):
            is_true = torch.rand(len(wave), 1) < truth if time >= 15 else torch.ones(len(wave), 1, dtype=torch.bool)
            hidden = cell(torch.where(is_true, wave[:, time : time + 1], value), hidden)
            value = head(hidden)
            found.append(value)
        return torch.cat(found[14:], 1)

    for step in range(350):
        wave = waves(32)
        loss = F.mse_loss(forecast(wave, max(0.0, 1 - step / 200)), wave[:, 15:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.step(loss, batch=wave)
    wave = waves(200)
    with torch.no_grad():
        assert F.mse_loss(forecast(wave, 0.0), wave[:, 15:]) < 0.2
