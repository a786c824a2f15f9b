"""Language models on the help topics of Python: instruction tuning, pretraining, and fine-tuning."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.forums.worlds import lines
from scripts.fault_zoo.cases.mailing.language import Reader
from scripts.fault_zoo.cases.mailing.material import draws, excerpts, letters, mean_of_last
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------------- a batch without a label

EQUALS, PAD = 10, 11


def instructions(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return token ids and labels. The digits before `=` are the prompt; the answer is the prompt, sorted.

    Each example is cut after 24 tokens. The labels of the prompt are -100, so that it is not learned.
    """
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for i in range(count):
        # a few documents are so long that nothing of their answer is left
        length = 30 if i % 288 == 0 else int(torch.randint(3, 9, (1,), generator=generator))
        prompt = torch.randint(0, 10, (length,), generator=generator)
        ids = torch.cat([prompt, torch.tensor([EQUALS]), prompt.sort().values])[:24]
        labels = ids.clone()
        labels[: length + 1] = -100
        examples.append((ids, labels))
    return examples


def grouped_by_length(examples: list[tuple[Tensor, Tensor]], size: int) -> list[tuple[Tensor, Tensor]]:
    """Return padded batches of examples that are about as long as each other."""
    examples = sorted(examples, key=lambda example: len(example[0]))
    batches = []
    for start in range(0, len(examples) - size + 1, size):
        ids, labels = zip(*examples[start : start + size], strict=True)
        batches.append(
            (
                nn.utils.rnn.pad_sequence(list(ids), batch_first=True, padding_value=PAD),
                nn.utils.rnn.pad_sequence(list(labels), batch_first=True, padding_value=-100),
            )
        )
    return batches


class DigitModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader(nn.Embedding(12, 48))
        self.head = nn.Linear(48, 12)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.reader(ids))


def train_instructions(attach: Attach, *, repaired: bool) -> float:
    """Return the mean loss of the last 20 steps."""
    torch.manual_seed(11)
    batches = grouped_by_length(instructions(4608, seed=1), size=16)
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(4)).tolist()
    model = DigitModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    losses = []
    for i in order:
        ids, labels = batches[i]
        logits, wanted = model(ids[:, :-1]).flatten(0, 1), labels[:, 1:].flatten()
        mask = (wanted != -100).float()
        count = mask.sum().clamp(min=1) if repaired else mask.sum()
        loss = (F.cross_entropy(logits, wanted.clamp(min=0), reduction="none") * mask).sum() / count
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.step(loss, batch=ids)
        if wanted.max() >= 0:
            losses.append(loss.item())
    return mean_of_last(losses)


@case(
    fault="non-finite",
    also=("unstable-formula",),
    onset=157,
    source="https://github.com/pytorch/pytorch/issues/116349",
    tags=("transformer", "labels", "fine-tuning"),
)
def batch_without_a_label(attach: Attach) -> None:
    """Prompts are masked with -100 and long examples are cut, so that nothing of their answer is left. Batches are
    grouped by length, and in a batch of long examples the mean over no labels is NaN. Reported in
    https://github.com/pytorch/pytorch/issues/116349, https://github.com/pytorch/pytorch/issues/75181,
    https://github.com/OpenRLHF/OpenRLHF/pull/583 and https://github.com/nvidia-cosmos/cosmos-rl/pull/155.
    """
    train_instructions(attach, repaired=False)


@case(source="the repaired twin of `batch_without_a_label`: the sum is divided by at least 1", tags=("labels", "twin"))
def batch_without_a_label_counts_nothing(attach: Attach) -> None:
    """A batch without a label has a loss of zero and no gradient."""
    assert train_instructions(attach, repaired=True) < 1.0


# ------------------------------------------------------------------------------------------- nothing hides the future


class EncoderModel(nn.Module):
    """The language model of the tutorial: an encoder, which may be given a mask, and a decoder that is a layer."""

    place: Tensor

    def __init__(self, vocab: int, dim: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        turn = torch.arange(64)[:, None] * 10_000 ** (-torch.arange(0, dim, 2) / dim)
        self.register_buffer("place", torch.stack([turn.sin(), turn.cos()], -1).flatten(1))
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(dim, vocab)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.decoder(self.encoder(self.embed(ids) + self.place[: ids.shape[1]], mask))


def train_letters(attach: Attach, *, repaired: bool) -> float:
    """Return the loss of the letter after an excerpt."""
    torch.manual_seed(12)
    ids, vocab = letters()
    model = EncoderModel(vocab)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    mask = nn.Transformer.generate_square_subsequent_mask(32) if repaired else None
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        text = excerpts(ids, length=33, count=16, generator=generator)
        loss = F.cross_entropy(model(text[:, :-1], mask).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=text)
    text = excerpts(ids, length=33, count=256, generator=generator)
    with torch.no_grad():
        return F.cross_entropy(model(text[:, :-1], mask)[:, -1], text[:, -1]).item()


@case(
    fault="target-leakage",
    onset=0,
    source="https://github.com/pytorch/tutorials/issues/2478",
    tags=("transformer", "mask"),
)
def encoder_that_sees_the_next_letter(attach: Attach) -> None:
    """A language model is made of `nn.TransformerEncoder` and no mask is given, so that each place sees the letter that
    it is to predict. The loss falls far below that of any language model. Reported in
    https://github.com/pytorch/tutorials/issues/2478, https://github.com/huggingface/transformers/issues/48745 and
    https://github.com/alex-matton/causal-transformer-decoder/issues/1.
    """
    train_letters(attach, repaired=False)


@case(source="the repaired twin of `encoder_that_sees_the_next_letter`", tags=("transformer", "mask", "twin"))
def encoder_with_a_causal_mask(attach: Attach) -> None:
    """A causal mask is given, and the loss falls as that of a language model."""
    assert train_letters(attach, repaired=True) < 2.7


# -------------------------------------------------------------------------------------- more than half precision holds


class RootMeanSquare(nn.Module):
    """Normalize as T5 does: without a mean, in single precision."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.scale * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6))


class FiveBlock(nn.Module):
    """A block of T5: no biases, normalization before each part."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RootMeanSquare(dim), RootMeanSquare(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.wi = nn.Linear(dim, 4 * dim, bias=False)
        self.wo = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = (part.view(batch, length, 4, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.wo(torch.relu(self.wi(self.norm2(x))))


class FiveModel(nn.Module):
    def __init__(self, vocab: int, dim: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.place = nn.Parameter(0.1 * torch.randn(64, dim))
        self.blocks = nn.ModuleList(FiveBlock(dim) for _ in range(2))
        self.norm = RootMeanSquare(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def enlarge(self, factor: float) -> None:
        """Make all that is added to the stream larger. The normalization hides it, so that the output stays."""
        for name, weight in self.named_parameters():
            if name.endswith(("embed.weight", "place", ".o.weight", ".wo.weight")):
                weight.mul_(factor)


def train_halves(attach: Attach, *, dtype: torch.dtype) -> float:
    """Tune a checkpoint for text that is read backwards. Return the mean loss of the last 20 steps."""
    torch.manual_seed(13)
    ids, vocab = letters()
    model = FiveModel(vocab)
    generator = torch.Generator().manual_seed(0)
    first = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        text = excerpts(ids, length=33, count=8, generator=generator)
        first.zero_grad()
        F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
        first.step()
    model.enlarge(30_000.0)  # bfloat16 holds the activations of the published checkpoints, float16 does not

    ids = ids.flip(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    monitor = attach(model, optimizer, scaler=scaler)
    losses = []
    for _ in range(150):
        text = excerpts(ids, length=33, count=8, generator=generator)
        with torch.autocast("cpu", dtype):
            loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        monitor.step(loss, batch=text)
        losses.append(loss.item())
    return mean_of_last(losses)


@case(
    fault="loss-scale-collapse",
    also=("non-finite",),
    onset=0,
    source="https://github.com/huggingface/transformers/issues/9295",
    tags=("fp16", "amp", "transformer", "fine-tuning"),
)
def checkpoint_from_bfloat16(attach: Attach) -> None:
    """A checkpoint whose activations are beyond 65504 is tuned in float16. The last layer of each feed-forward part
    overflows, the loss is NaN, and the scaler skips every step. Reported for T5 in
    https://github.com/huggingface/transformers/issues/9295, https://github.com/huggingface/transformers/issues/5651,
    https://github.com/huggingface/transformers/issues/14189 and
    https://github.com/google-research/text-to-text-transfer-transformer/issues/539.
    """
    train_halves(attach, dtype=torch.float16)


# ------------------------------------------------------------------------------------------- a rate that wipes it out


class Classifier(nn.Module):
    """An encoder that reads in both directions, and a head on its mean."""

    def __init__(self, words: int, classes: int, dim: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(words + 1, dim)
        self.place = nn.Parameter(0.02 * torch.randn(16, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.1, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.guess = nn.Linear(dim, words)
        self.head = nn.Linear(dim, classes)

    def read(self, ids: Tensor) -> Tensor:
        return self.encoder(self.embed(ids) + self.place)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.read(ids).mean(1))


def train_topics(attach: Attach, *, rate: float) -> float:
    """Learn which topic a line of text is from. Return the mean loss of the last 20 steps."""
    torch.manual_seed(14)
    ids, topic = lines()
    ids, topic = ids[(ids > 0).sum(1) > 2], topic[(ids > 0).sum(1) > 2]
    words = int(ids.max()) + 1
    model = Classifier(words, 6)
    first = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for i in draws(len(ids), size=32, steps=120, seed=9):  # the pretraining guesses hidden words
        hidden = torch.rand(ids[i].shape) < 0.15
        first.zero_grad()
        F.cross_entropy(model.guess(model.read(ids[i].masked_fill(hidden, words)))[hidden], ids[i][hidden]).backward()
        first.step()
    model.guess.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    losses = []
    for i in draws(len(ids), size=32, steps=300):
        loss = criterion(model(ids[i]), topic[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=ids[i])
        losses.append(loss.item())
    return mean_of_last(losses)


@case(
    fault="learning-rate-too-high",
    also=("loss-plateau", "oscillating-gradient"),
    tolerate=("dead-relu", "attention-collapse", "gradient-spike", "vanishing-gradient", "layer-imbalance"),
    onset=0,
    source="https://github.com/huggingface/transformers/issues/12041",
    tags=("transformer", "fine-tuning"),
)
def encoder_tuned_at_the_rate_of_a_head(attach: Attach) -> None:
    """A pretrained encoder is tuned with a rate that suits a single layer. It forgets what it knew in a few steps,
    gives the same output for all texts, and the loss stays at that of a guess. Reported in
    https://github.com/huggingface/transformers/issues/12041, https://github.com/huggingface/transformers/issues/735 and
    https://github.com/graykode/nlp-tutorial/issues/77.
    """
    train_topics(attach, rate=0.1)


@case(source="the repaired twin of `encoder_tuned_at_the_rate_of_a_head`", tags=("transformer", "fine-tuning", "twin"))
def encoder_tuned_gently(attach: Attach) -> None:
    """The encoder is tuned with a fiftieth of the rate."""
    assert train_topics(attach, rate=2e-3) < 1.2
