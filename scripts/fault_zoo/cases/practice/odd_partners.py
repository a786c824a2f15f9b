"""Runs that look odd and are fine: two players, two networks, two optimizers, frozen parts."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.practice.rates import SmallGPT
from scripts.fault_zoo.cases.reports.material import accuracy, digits, indices, text, windows
from scripts.fault_zoo.protocol import Attach, case


@case(
    source="Goodfellow et al. 2014 with the loss that does not saturate; generator and critic are both watched",
    tags=("gan", "two-optimizers"),
    tolerate=("loss-plateau", "oscillating-gradient"),
)
def ring_from_two_players(attach: Attach) -> None:
    """A GAN on a ring of eight spots. Both losses settle at those of a guess, and neither falls."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    makes = torch.optim.Adam(generator.parameters(), lr=3e-3, betas=(0.5, 0.9))
    judges = torch.optim.Adam(critic.parameters(), lr=3e-3, betas=(0.5, 0.9))
    monitor = attach(nn.ModuleDict({"generator": generator, "critic": critic}), [makes, judges])
    for _ in range(500):
        turn = torch.randint(8, (64,)) * math.pi / 4
        real = torch.stack([turn.cos(), turn.sin()], 1) + 0.1 * torch.randn(64, 2)
        fake = generator(torch.randn(64, 4))
        judgement = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        judges.zero_grad()
        judgement.backward()
        judges.step()
        loss = F.softplus(-critic(fake)).mean()
        makes.zero_grad()
        loss.backward()
        makes.step()
        monitor.step(loss + judgement.detach(), batch=real)
    with torch.no_grad():
        radius = generator(torch.randn(500, 4)).norm(dim=1)
    assert (radius - 1).abs().mean() < 0.25


@case(
    source="Grill et al. 2020: BYOL; the target network is a moving mean of the online one", tags=("ema", "contrastive")
)
def views_of_a_digit(attach: Attach) -> None:
    """Two noisy views of a digit shall have the same projection; the target gets no gradient, and no label is used."""
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    online = nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 32))
    target = copy.deepcopy(online).requires_grad_(False)
    predictor = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
    model = nn.ModuleDict({"online": online, "target": target, "predictor": predictor})
    optimizer = torch.optim.Adam([*online.parameters(), *predictor.parameters()], lr=2e-3)
    monitor = attach(model, optimizer)
    chosen = indices(len(x), 96)
    for _ in range(300):
        i = next(chosen)
        one, two = (x[i] * (torch.rand(96, 64) > 0.3) + 0.1 * torch.randn(96, 64) for _ in range(2))
        with torch.no_grad():
            wanted_one, wanted_two = target(two), target(one)
        similar = F.cosine_similarity(predictor(online(one)), wanted_one)
        similar = similar + F.cosine_similarity(predictor(online(two)), wanted_two)
        loss = 2 - similar.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                slow.lerp_(fast, 0.02)
        monitor.step(loss, batch=x[i])
    online.eval()
    with torch.no_grad():
        near = (F.normalize(online(test_x)) @ F.normalize(online(x)).T).argmax(1)
    assert (y[near] == test_y).float().mean() > 0.85


def lower_and_upper(size: int) -> tuple[Tensor, Tensor, int]:
    """Return a text in small letters, the same text in capitals, and how many characters there are in both."""
    lower = text()[20_000 : 20_000 + size].lower()
    upper = lower.upper()
    numbers = {c: i for i, c in enumerate(sorted({*lower, *upper}))}
    return torch.tensor([numbers[c] for c in lower]), torch.tensor([numbers[c] for c in upper]), len(numbers)


@case(
    source="Ben Zaken et al. 2022: BitFit; only the biases are tuned, all weights are frozen",
    tags=("gpt", "text", "frozen", "fine-tuning"),
)
def biases_for_capitals(attach: Attach) -> None:
    """A GPT that learned small letters shall write capitals: its weights are frozen and its biases are tuned."""
    torch.manual_seed(0)
    lower, upper, vocabulary = lower_and_upper(40_000)
    model = SmallGPT(vocabulary)
    generator = torch.Generator().manual_seed(1)
    trained = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        x, y = windows(lower, 24, 8, generator)
        trained.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        trained.step()
    model.zero_grad()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-2)
    monitor = attach(model, optimizer)
    losses = []
    for _ in range(160):
        x, y = windows(upper, 24, 8, generator)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)
        losses.append(loss.item())
    assert sum(losses[-20:]) / 20 < 0.6 * losses[0]


@case(
    source="Yi et al. 2019: two towers, sparse embedding bags under SparseAdam, dense layers under Adam",
    tags=("recommender", "sparse", "two-optimizers"),
)
def readers_and_books(attach: Attach) -> None:
    """Sparse gradients for the tables and dense ones for the layers, each with an optimizer; few books are popular, so
    that most rows get no gradient for many steps.
    """
    torch.manual_seed(0)
    readers, books = torch.randn(300, 4), torch.randn(800, 4)
    popularity = 1.0 / torch.arange(1, 801.0)
    reader_table = nn.EmbeddingBag(800, 24, sparse=True)  # a reader is the bag of the books that were read
    book_table = nn.Embedding(800, 24, sparse=True)
    reader_layer, book_layer = nn.Linear(24, 16), nn.Linear(24, 16)
    parts = {"readers": reader_table, "books": book_table, "reader": reader_layer, "book": book_layer}
    model = nn.ModuleDict(parts)
    sparse = torch.optim.SparseAdam([*reader_table.parameters(), *book_table.parameters()], lr=1e-2)
    dense = torch.optim.Adam([*reader_layer.parameters(), *book_layer.parameters()], lr=3e-3)
    monitor = attach(model, [sparse, dense])
    liking = (popularity.log() + 1.5 * readers @ books.T).softmax(1)
    losses = []
    for _ in range(350):
        who = torch.randint(300, (64,))
        read = torch.multinomial(liking[who], 7)
        past, following = read[:, :6], read[:, 6]
        left, right = reader_layer(reader_table(past)), book_layer(book_table(following))
        logits = left @ right.T - popularity[following].log()  # corrected for how often a book is in a batch
        loss = F.cross_entropy(
            logits.masked_fill((following[:, None] == following) & ~torch.eye(64, dtype=torch.bool), -1e4),
            torch.arange(64),
        )
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        monitor.step(loss, batch=past)
        losses.append(loss.item())
    assert sum(losses[-30:]) < 0.92 * sum(losses[:30])


@case(
    source="the usual fine-tuning: frozen statistics, a slow trunk, a fast head, four micro-batches",
    tags=("fine-tuning", "frozen", "batch-norm", "accumulation"),
)
def head_fast_trunk_slow(attach: Attach) -> None:
    """A network for digits is tuned for upside-down ones: the first layer and the statistics of the normalization are
    frozen, the trunk has a hundredth of the rate of the head, and four micro-batches make a step.
    """
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    model = nn.Sequential(
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 48),
        nn.BatchNorm1d(48),
        nn.ReLU(),
        nn.Linear(48, 10),
    )
    trained = torch.optim.Adam(model.parameters(), lr=3e-3)
    chosen = indices(len(x), 32)
    for _ in range(200):
        i = next(chosen)
        trained.zero_grad()
        F.cross_entropy(model(x[i]), y[i]).backward()
        trained.step()
    model.eval()  # the statistics stay those of the first training
    for layer in (0, 1):
        model[layer].requires_grad_(False)
    model[6] = nn.Linear(48, 10)
    trunk = [*model[3].parameters(), *model[4].parameters()]
    optimizer = torch.optim.Adam([{"params": trunk, "lr": 1e-4}, {"params": model[6].parameters(), "lr": 1e-2}])
    monitor = attach(model, optimizer, accumulate=4)
    for _ in range(120):
        total = 0.0
        for _ in range(4):
            i = next(chosen)
            loss = F.cross_entropy(model(x[i].flip(1)), y[i]) / 4
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(total, batch=x[i])
    assert accuracy(model, test_x.flip(1), test_y) > 0.75


class Experts(nn.Module):
    """A router sends each point to the two best of eight experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(2, 8)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 1)) for _ in range(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        if self.training:
            logits = logits + 0.5 * torch.randn_like(logits)
        best, which = logits.topk(2, dim=1)
        share = torch.zeros_like(logits).scatter(1, which, best.softmax(1))
        out = torch.zeros(len(x), 1)
        for number, expert in enumerate(self.experts):
            sent = share[:, number].nonzero().squeeze(1)
            if len(sent):
                out = out.index_add(0, sent, share[sent, number, None] * expert(x[sent]))
        load = (share > 0).float().mean(0)
        return out, 8 * (load * logits.softmax(1).mean(0)).sum()


@case(source="Shazeer et al. 2017: noisy top-2 gating with a loss that balances the load", tags=("moe",))
def experts_with_balance(attach: Attach) -> None:
    """Eight experts with a small batch: in some steps an expert gets no point and no gradient."""
    torch.manual_seed(0)
    model = Experts()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.5e-2)
    monitor = attach(model, optimizer)

    def target(x: Tensor) -> Tensor:
        return torch.where(x[:, :1] * x[:, 1:] > 0, torch.sin(2 * x[:, :1]), 0.5 * x[:, 1:])

    for _ in range(400):
        x = 4 * torch.rand(32, 2) - 2
        out, balance = model(x)
        loss = F.mse_loss(out, target(x)) + 0.01 * balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)
    model.eval()
    x = 4 * torch.rand(500, 2) - 2
    with torch.no_grad():
        assert F.mse_loss(model(x)[0], target(x)) < 0.5 * target(x).var()
