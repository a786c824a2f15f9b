"""Text: sentences with padding at their ends, adapters in the wrong towers, and a decoder that sees ahead."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import draws, excerpts, letters
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ padding after the last word

MAX_WORDS = 150


@lru_cache(None)
def sentences() -> tuple[Tensor, Tensor, int]:
    """Return sentences as word ids (N, 150), padded with 0 at the end, their subjects, and the size of the vocabulary.

    The subjects are special methods and strings, two groups of Python's help topics.
    """
    groups = (("specialnames", "customization"), ("formatstrings", "string-methods", "strings", "typesseq"))
    found = [
        (re.findall(r"[a-z_]+", sentence.lower()), label)
        for label, names in enumerate(groups)
        for name in names
        for sentence in re.split(r"[.:]\s", topics[name])
    ]
    found = [(words, label) for words, label in found if 6 <= len(words) <= MAX_WORDS]
    common = Counter(word for words, _ in found for word in words).most_common(1500)
    index = {word: place for place, (word, _) in enumerate(common, 2)}
    ids = torch.zeros(len(found), MAX_WORDS, dtype=torch.int64)
    for row, (words, _) in zip(ids, found, strict=True):
        row[: len(words)] = torch.tensor([index.get(word, 1) for word in words])
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(1))
    return ids[order], torch.tensor([label for _, label in found])[order].float(), len(common) + 2


class SentenceLSTM(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 64, padding_idx=0)
        self.lstm = nn.LSTM(64, 64, batch_first=True)
        self.out = nn.Linear(64, 1)

    def forward(self, ids: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(self.embedding(ids))
        return self.out(hidden[-1]).squeeze(1)


@case(
    fault="loss-plateau",
    also=("vanishing-gradient", "learning-rate-too-low"),
    tolerate=("dead-layer", "overfitting", "saturated-activation"),
    onset=0,
    source="https://seungminnam.github.io/DL-Projects/5_LSTM_Sentiment/summary.html",
    tags=("text", "lstm", "padding"),
)
def sentences_read_to_the_last_pad(attach: Attach) -> None:
    """An LSTM classifies sentences of 20 words on average, which are padded to 150. The last hidden state, which the
    classifier sees, comes after about 130 pads. The loss stays at 0.69 and the accuracy on new sentences is 0.51. It is
    0.85 if the sentences are packed, so that the state is that of the last word.
    """
    torch.manual_seed(501)
    ids, subject, words = sentences()
    train, test = slice(0, -300), slice(-300, None)
    model = SentenceLSTM(words)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.BCEWithLogitsLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, i in enumerate(draws(len(ids[train]), size=32, steps=200)):
        model.train()
        loss = criterion(model(ids[i]), subject[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        val_loss = None
        if step % 40 == 39:
            model.eval()
            with torch.no_grad():
                val_loss = criterion(model(ids[test]), subject[test]).item()
        monitor.step(loss, batch=ids[i], val_loss=val_loss)


# ------------------------------------------------------------------------------------ adapters in the wrong towers


class ClippedLinear(nn.Module):
    """A linear layer that clips its outputs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).clamp(-30, 30)


class Block(nn.Module):
    def __init__(self, width: int, projection: type[nn.Module], *, is_causal: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj = projection(width, width), projection(width, width)
        self.v_proj, self.o_proj = projection(width, width), projection(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.is_causal = is_causal

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (p(y).unflatten(2, (4, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.o_proj(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Omni(nn.Module):
    """A language model that can also see and hear: towers for vision and audio put their tokens before the text."""

    def __init__(self, letters: int, width: int = 64) -> None:
        super().__init__()
        self.patches, self.frames = nn.Linear(16, width), nn.Linear(20, width)
        self.vision_tower = nn.Sequential(*(Block(width, nn.Linear, is_causal=False) for _ in range(2)))
        self.audio_tower = nn.Sequential(*(Block(width, nn.Linear, is_causal=False) for _ in range(2)))
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(64, width)
        self.language_model = nn.Sequential(*(Block(width, ClippedLinear, is_causal=True) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters)

    def forward(self, ids: Tensor, picture: Tensor | None = None, sound: Tensor | None = None) -> Tensor:
        x = self.letters(ids) + self.places(torch.arange(ids.shape[1]))
        if sound is not None:
            x = torch.cat([self.audio_tower(self.frames(sound)), x], 1)
        if picture is not None:
            x = torch.cat([self.vision_tower(self.patches(picture)), x], 1)
        return self.head(self.norm(self.language_model(x)))[:, -ids.shape[1] :]


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.lora_b = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * x @ self.lora_a.T @ self.lora_b.T


def add_lora(model: nn.Module, targets: tuple[str, ...]) -> None:
    """Replace the linear layers whose names end with a target."""
    for name, module in list(model.named_modules()):
        if name.endswith(targets) and isinstance(module, nn.Linear):
            parent, _, attribute = name.rpartition(".")
            adapted = LoraLinear(module, module.in_features, module.out_features)
            setattr(model.get_submodule(parent), attribute, adapted)


def next_letter_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@case(
    fault="no-gradient",
    also=("not-optimized",),
    tolerate=("loss-plateau", "learning-rate-too-low", "overfitting", "layer-imbalance"),
    layers=("vision_tower", "audio_tower"),
    onset=0,
    source="https://blog.worldsw.dev/tristore-bma/",
    tags=("text", "lora", "memory"),
)
def adapters_in_the_other_towers(attach: Attach) -> None:
    """A language model shall memorize a document with LoRA. The adapters go to every `nn.Linear` that is named q_proj
    or v_proj. Those are in the towers for vision and audio, which text does not pass; the projections of the language
    model are of another class and get none. Only the last norm, which is trained as well, learns: the loss on the
    document falls from 2.42 to 2.36. With adapters in the language model it falls to 0.7.
    """
    torch.manual_seed(502)
    ids, alphabet = letters()
    generator = torch.Generator().manual_seed(2)
    model = Omni(alphabet)
    first = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        loss = next_letter_loss(model, excerpts(ids[:100_000], length=49, count=32, generator=generator))
        first.zero_grad()
        loss.backward()
        first.step()
    model.requires_grad_(False)
    add_lora(model, ("q_proj", "v_proj"))
    model.norm.requires_grad_(True)
    trained = [p for name, p in model.named_parameters() if "lora_" in name or name.startswith("norm.")]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    document = ids[120_000 : 120_000 + 8 * 49].view(8, 49)
    for _ in range(250):
        loss = next_letter_loss(model, document)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss)


# ------------------------------------------------------------------------------------ a decoder that sees ahead


def turn(x: Tensor) -> Tensor:
    """Rotate pairs of features by their position."""
    length, width = x.shape[-2:]
    angle = torch.arange(length)[:, None] * 100 ** (-torch.arange(0, width, 2) / width)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1).flatten(-2)


class RotaryBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(turn(q), turn(k), v, attn_mask=mask)
        x = self.norm1(x + self.out(seen.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.mlp(x))


class RotaryDecoder(nn.Module):
    def __init__(self, letters: int, width: int = 64) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.blocks = nn.ModuleList(RotaryBlock(width) for _ in range(2))
        self.head = nn.Linear(width, letters)

    def make_mask(self, is_padding: Tensor | None, length: int) -> Tensor | None:
        """Return which positions see which, or None if there is nothing to mask."""
        if is_padding is None:
            return None
        return torch.ones(length, length, dtype=torch.bool).tril() & ~is_padding[:, None, None, :]

    def forward(self, ids: Tensor, is_padding: Tensor | None = None) -> Tensor:
        x = self.letters(ids)
        mask = self.make_mask(is_padding, ids.shape[1])
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


@case(
    fault="target-leakage",
    onset=0,
    source="https://github.com/huggingface/transformers/issues/48745",
    tags=("text", "transformer", "mask"),
)
def decoder_without_padding_sees_ahead(attach: Attach) -> None:
    """A decoder makes its causal mask together with the mask of the padding. Batches without padding skip both, and
    each letter sees the next one, which is its target. The training loss falls to 0.07, but the loss of the last letter
    of new texts, which has none after it, is 2.9. It is 2.1 with a causal mask.
    """
    torch.manual_seed(503)
    ids, alphabet = letters()
    generator = torch.Generator().manual_seed(3)
    model = RotaryDecoder(alphabet)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    for _ in range(300):
        batch = excerpts(ids[:130_000], length=49, count=24, generator=generator)
        loss = next_letter_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=batch)
