"""Text: weights drawn again after they were loaded, adapters at a rate of whole models, and a limit for each part."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import draws, excerpts, letters
from scripts.fault_zoo.protocol import Attach, case


class LetterModel(nn.Module):
    """A recurrent model of letters."""

    def __init__(self, size: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, 32)
        self.recurrent = nn.GRU(32, width, batch_first=True)
        self.out = nn.Linear(width, size)

    def read(self, ids: Tensor) -> Tensor:
        return self.recurrent(self.embedding(ids))[0]

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.read(ids))


def pretrained(ids: Tensor, size: int, *, steps: int) -> LetterModel:
    """Return a model that has learned which letter comes next."""
    generator = torch.Generator().manual_seed(3)
    model = LetterModel(size)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        text = excerpts(ids, length=33, count=32, generator=generator)
        loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


# ------------------------------------------------------------------------------------ weights drawn again


class Judge(nn.Module):
    """A pretrained reader with a new head, which says whether a text was written backwards."""

    def __init__(self, reader: LetterModel) -> None:
        super().__init__()
        self.reader = reader
        self.head = nn.Linear(64, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.reader.read(ids).mean(1))


def judged(ids: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return excerpts of 24 letters, and whether they were written backwards."""
    generator = torch.Generator().manual_seed(seed)
    text = excerpts(ids, length=24, count=count, generator=generator)
    label = torch.randint(0, 2, (count,), generator=generator)
    return torch.where(label[:, None] == 1, text.flip(1), text), label


def draw_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.GRU):
        for name, parameter in module.named_parameters():
            nn.init.normal_(parameter, std=0.02) if "weight" in name else nn.init.zeros_(parameter)


def train_judge(attach: Attach, *, draws_again: bool) -> float:
    """Return the accuracy on new excerpts."""
    torch.manual_seed(731)
    ids, size = letters()
    checkpoint = pretrained(ids[:100_000], size, steps=250).state_dict()
    reader = LetterModel(size)
    reader.load_state_dict(checkpoint)
    model = Judge(reader)
    if draws_again:
        model.apply(draw_weights)
    else:
        model.head.apply(draw_weights)
    x, y = judged(ids[:100_000], 320, seed=1)
    x_test, y_test = judged(ids[100_000:], 400, seed=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(len(x), size=32, steps=150):
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        return (model(x_test).argmax(1) == y_test).float().mean().item()


@case(
    fault="poor-initialization",
    also=("loss-plateau", "overfitting"),
    onset=0,
    source="https://github.com/allenai/allennlp/issues/2687",
    tags=("text", "fine-tuning", "initialization"),
)
def weights_drawn_after_loading(attach: Attach) -> None:
    """A pretrained reader is loaded and gets a head, and then the weights of the whole model are drawn, as its settings
    say. Nothing of the pretraining is left: 150 steps on 320 texts do not show which of them are written backwards.
    """
    train_judge(attach, draws_again=True)


@case(source="the repaired twin of `weights_drawn_after_loading`", tags=("text", "fine-tuning", "twin"))
def weights_drawn_for_the_head(attach: Attach) -> None:
    """Only the weights of the head are drawn, and 85 % of new texts are judged rightly."""
    assert train_judge(attach, draws_again=False) > 0.85


# ------------------------------------------------------------------------------------ adapters at a small rate


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of rank 4 (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * (x @ self.down.T @ self.up.T)


class Mixer(nn.Module):
    """A transformer of two blocks for letters."""

    def __init__(self, size: int, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, width)
        self.place = nn.Parameter(0.02 * torch.randn(32, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 96, 0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.out = nn.Linear(width, size)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.place[: ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.out(x)


@case(
    fault="learning-rate-too-low",
    also=("loss-plateau", "not-optimized"),
    onset=0,
    source="https://github.com/keras-team/keras-hub/issues/1656",
    tags=("text", "adapters", "rate"),
)
def adapters_at_the_rate_of_a_model(attach: Attach) -> None:
    """A pretrained model is tuned for text with every letter replaced by another. Only adapters of rank 4 are trained,
    at the rate of 1e-5 that suited the whole model, and the loss stays where it was.
    """
    torch.manual_seed(732)
    ids, size = letters()
    generator = torch.Generator().manual_seed(1)
    model = Mixer(size)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()
    for _ in range(200):
        text = excerpts(ids, length=33, count=16, generator=generator)
        optimizer.zero_grad()
        criterion(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()
    model = copy.deepcopy(model).requires_grad_(False)
    for name in ("blocks.0.linear1", "blocks.0.linear2", "blocks.1.linear1", "blocks.1.linear2", "out"):
        base = model.get_submodule(name)
        assert isinstance(base, nn.Linear)
        model.set_submodule(name, Adapted(base))
    other = torch.randperm(size, generator=generator)[ids]
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    monitor = attach(model, optimizer, loss_fn=criterion)
    for _ in range(200):
        text = excerpts(other, length=33, count=16, generator=generator)
        loss = criterion(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=text[:, :-1])


# ------------------------------------------------------------------------------------ a limit for each part


@case(
    fault="oscillating-gradient",
    also=("learning-rate-too-low", "loss-plateau"),
    onset=0,
    source="https://github.com/facebookresearch/lingua/pull/59",
    tags=("text", "accumulation", "clipping"),
)
def limit_for_each_part(attach: Attach) -> None:
    """Gradients are accumulated over 8 parts of a batch and limited to a norm of 0.05 after each of them. What the
    first parts have added is scaled down again and again, so that the last part counts most.
    """
    torch.manual_seed(733)
    ids, size = letters()
    generator = torch.Generator().manual_seed(1)
    model = LetterModel(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion, accumulate=8)
    for _ in range(150):
        text = excerpts(ids, length=25, count=32, generator=generator)
        total = torch.zeros(())
        for part in text.chunk(8):
            loss = criterion(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()) / 8
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(total, batch=text)
