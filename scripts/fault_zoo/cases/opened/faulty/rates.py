"""Hyper-parameters and data scale: learning rates, initialisation, imbalance, generalisation, plateaus."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.faulty_data import (
    batches,
    chars,
    digits,
    houses,
    ratings,
    setup,
    split,
    standardize,
    table,
    windows,
)
from scripts.fault_zoo.cases.opened.faulty.wiring import TiedLM
from scripts.fault_zoo.protocol import Attach, case

# ---------------------------------------------------------------------------------------------- learning-rate-too-high


@case(
    fault="learning-rate-too-high",
    onset=100,
    also=("exploding-gradient",),
    tolerate=("oscillating-gradient", "gradient-spike", "dead-relu", "loss-plateau", "dead-layer", "no-gradient"),
    tags=("mid-run",),
    source=(
        "own construction: ExponentialLR with gamma > 1; cf. pytorch/pytorch#21623 (a rate that compounds 2, 4, 8, 16,"
        " 32)"
    ),
)
def houses_growing_rate(attach: Attach) -> None:
    """The 'decay' of the learning rate is 1.04 per update instead of 0.96; it compounds until training comes apart."""
    setup(160)
    x, price = houses()
    x, y = standardize(x), (price - price.mean()) / price.std()
    model = nn.Sequential(nn.Linear(6, 128), nn.ELU(), nn.Linear(128, 128), nn.ELU(), nn.Linear(128, 1), nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=1.04)
    criterion = nn.SmoothL1Loss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for xb, yb in batches(x, y, size=128, steps=140):
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        scheduler.step()
        monitor.step(loss, batch=xb)


class KeypointNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.LeakyReLU(0.1),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.LeakyReLU(0.1),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.points = nn.Sequential(nn.Linear(2 * width * 16, 64), nn.LeakyReLU(0.1), nn.Linear(64, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.points(self.features(x))


@case(
    fault="learning-rate-too-high",
    onset=0,
    tolerate=(
        "oscillating-gradient",
        "gradient-spike",
        "exploding-gradient",
        "dead-relu",
        "loss-plateau",
        "rising-sparsity",
        "dead-layer",
        "vanishing-gradient",
        "no-gradient",
    ),
    source=(
        "DeepLocalize benchmark, FacialKeypointsDetection: Adam(lr=0.1) on a mean squared error; StackOverflow "
        "37624102 (SGD lr=0.1, nesterov 0.9)"
    ),
)
def disc_keypoints(attach: Attach) -> None:
    """The keypoint regressor is trained by Adam with a learning rate of 0.15; the loss jumps by five orders and bounces
    above its first value ever after.
    """
    setup(161)
    generator = torch.Generator().manual_seed(3)
    centre = 4 + 8 * torch.rand(2000, 2, generator=generator)
    grid = torch.stack(torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij"))
    x = torch.exp(-((grid[None] - centre[:, :, None, None]) ** 2).sum(1, keepdim=True) / 4) + 0.1 * torch.randn(
        2000, 1, 16, 16, generator=generator
    )
    y = (centre - 8) / 4
    model = KeypointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.15)
    criterion = nn.MSELoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for images, points in batches(x, y, size=64, steps=150):
        optimizer.zero_grad()
        loss = criterion(model(images), points)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=images)


# ----------------------------------------------------------------------------------------------- learning-rate-too-low


@case(
    fault="learning-rate-too-low",
    onset=0,
    tolerate=("loss-plateau", "not-optimized", "vanishing-gradient"),
    tags=("amp",),
    source=(
        "victorchall/EveryDream2trainer#175 ('effectively halting training'), Lightning-AI/pytorch-lightning#9694, "
        "milesial/Pytorch-UNet#468: gradients are clipped while still scaled"
    ),
)
def digits_clipped_amp(attach: Attach) -> None:
    """clip_grad_norm_ comes before unscale_: gradients scaled by 65536 are clipped to 1 and then divided by 65536."""
    setup(162)
    x, y = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, scaler=scaler, loss_fn=criterion)
    for images, labels in batches(x, y, size=64, steps=200):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        monitor.step(loss, batch=images)


@case(
    fault="learning-rate-too-low",
    onset=0,
    also=("not-optimized",),
    tolerate=("loss-plateau", "fp16-underflow"),
    tags=("bf16",),
    source=(
        "workofart/ml-by-hand#85 (0 of 768 weights moved in 100 steps), pytorch/ao#1124, tianweiy/CausVid#19: updates "
        "are rounded away in bfloat16 weights"
    ),
)
def digits_bfloat16(attach: Attach) -> None:
    """The weights themselves are bfloat16; at this rate nearly every update is below half a unit in the last place and
    is rounded away.
    """
    setup(163)
    x, y = digits()
    x = x.flatten(1).to(torch.bfloat16)
    model = nn.Sequential(
        nn.Linear(64, 512),
        nn.LayerNorm(512),
        nn.GELU(),
        nn.Linear(512, 512),
        nn.LayerNorm(512),
        nn.GELU(),
        nn.Linear(512, 10),
    ).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    for xb, yb in batches(x, y, size=64, steps=300):
        loss = F.cross_entropy(model(xb).float(), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)


# ------------------------------------------------------------------------------------------------- poor-initialization


class WordLM(nn.Module):
    def __init__(self, vocab: int, dim: int = 96) -> None:
        super().__init__()
        self.encoder = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.decoder = nn.Linear(dim, vocab)
        self.decoder.weight = self.encoder.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(self.norm(self.rnn(self.encoder(ids))[0]))


@case(
    fault="poor-initialization",
    layers=("encoder", "decoder"),
    onset=0,
    tolerate=("exploding-gradient", "layer-imbalance", "learning-rate-too-low", "learning-rate-too-high"),
    source=(
        "pytorch/pytorch#3121 (nn.Embedding is drawn from N(0, 1)), huggingface/transformers#26441 (an initial cross "
        "entropy of 110): tied to the output layer"
    ),
)
def char_gru_tied(attach: Attach) -> None:
    """The output layer shares nn.Embedding's N(0, 1) weights; the first loss is several times ln(vocabulary)."""
    setup(164)
    ids, vocab = chars()
    model = WordLM(vocab)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    for _step in range(130):
        x, y = windows(ids, 32, 20)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)


class TreeishNet(nn.Module):
    def __init__(self, dim: int = 13, hidden: int = 64, classes: int = 3) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, classes)
        for m in (self.fc1, self.fc2, self.fc3):
            nn.init.constant_(m.weight, 0.05)
            nn.init.zeros_(m.bias)

    def forward(self, x: Any) -> Any:
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


@case(
    fault="poor-initialization",
    layers=("fc1", "fc2", "fc3"),
    onset=0,
    also=("loss-plateau",),
    tolerate=("dead-relu", "learning-rate-too-low", "vanishing-gradient"),
    source=(
        "own construction: constant weights (CS231n notes, 'pitfall: all zero initialization'); 'initialization' is a "
        "label of StackOverflow 34311586 in DeepFD"
    ),
)
def wine_constant_weights(attach: Attach) -> None:
    """Every weight starts at 0.05, so all units of a layer compute, and go on computing, the same thing."""
    setup(165)
    x, y = table("wine")
    x = standardize(x)
    model = TreeishNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for xb, yb in batches(x, y, size=32, steps=300):
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)


# ----------------------------------------------------------------------------------------------------- layer-imbalance


class Listing(nn.Module):
    def __init__(self, dim: int, hidden: int = 96) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.segment = nn.Linear(hidden, 4)
        self.price = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.segment(h), self.price(h.detach()).squeeze(1)


@case(
    fault="layer-imbalance",
    layers=("price",),
    onset=0,
    tolerate=("exploding-gradient", "learning-rate-too-low", "loss-plateau", "poor-initialization"),
    tags=("multi-task",),
    source=(
        "own construction: a loss in euros beside a cross entropy (GradNorm, Chen et al. 2018); StackOverflow 51181393"
        " (prices as they are)"
    ),
)
def listings_two_heads(attach: Attach) -> None:
    """A probe predicts the price in euros beside a classifier of segments; its gradient is 1,000,000x the rest's."""
    setup(167)
    x, price = houses()
    x = standardize(x)
    segment = (x[:, 0] > 0).long() * 2 + (x[:, 4] > 0).long()
    model = Listing(x.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer)
    for xb, sb, pb in batches(x, segment, price, size=64, steps=400):
        logits, guess = model(xb)
        loss = F.cross_entropy(logits, sb) + F.mse_loss(guess, pb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)


class ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.weight * grad, None


class DomainNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.label = nn.Sequential(nn.Linear(8 * width, 64), nn.ReLU(), nn.Linear(64, 10))
        self.domain = nn.Sequential(nn.Linear(8 * width, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        h = self.features(x)
        return self.label(h), self.domain(ReverseGradient.apply(h, weight))


@case(
    fault="layer-imbalance",
    layers=("features",),
    onset=24,
    also=("exploding-gradient",),
    tolerate=("loss-plateau", "oscillating-gradient", "saturated-activation", "learning-rate-too-high"),
    tags=("mid-run",),
    source=(
        "own construction: the schedule of DANN (Ganin et al. 2016, lambda = 2 / (1 + exp(-10 p)) - 1, p in [0, 1]) "
        "replaced by 10 * step"
    ),
)
def digits_domain_adversarial(attach: Attach) -> None:
    """The weight of the reversed gradient is 10 * step (progress was meant to run from 0 to 1); the feature extractor's
    gradient outgrows the heads' a thousandfold.
    """
    setup(168)
    x, y = digits()
    inverted = 1 - x + 0.2 * torch.randn(x.shape)
    model = DomainNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, (source, labels, target) in enumerate(batches(x, y, inverted, size=32, steps=250)):
        both = torch.cat([source, target])
        logits, domain = model(both, 10.0 * step)
        place = torch.cat([torch.zeros(32), torch.ones(32)]).long()
        loss = criterion(logits[:32], labels) + criterion(domain, place)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=both)


# --------------------------------------------------------------------------------------------------------- overfitting


@case(fault="overfitting", onset=80, source="own construction: a small GPT on a corpus of 2 000 characters")
def chargpt_tiny_corpus(attach: Attach) -> None:
    """A GPT with 60 000 weights on 2 000 characters, without dropout, for a hundred passes."""
    setup(169)
    ids, vocab = chars()
    train, val = ids[:2000], ids[4000:7000]
    model = TiedLM(vocab, dim=48, depth=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    generator = torch.Generator().manual_seed(0)
    xv, yv = windows(val, 40, 16, generator)
    for step in range(220):
        x, y = windows(train, 40, 16)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            with torch.no_grad():
                val_loss = F.cross_entropy(model(xv).flatten(0, 1), yv.flatten())
            monitor.step(loss, batch=x, val_loss=val_loss)
        else:
            monitor.step(loss, batch=x)


class NeuralCF(nn.Module):
    def __init__(self, users: int, items: int, dim: int = 32) -> None:
        super().__init__()
        self.user = nn.Embedding(users, dim)
        self.item = nn.Embedding(items, dim)
        for e in (self.user, self.item):
            nn.init.normal_(e.weight, std=0.1)
        self.mlp = nn.Sequential(nn.Linear(2 * dim, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, u: Tensor, i: Tensor) -> Tensor:
        return self.mlp(torch.cat([self.user(u), self.item(i)], 1)).squeeze(1)


@case(
    fault="overfitting",
    onset=40,
    tags=("embedding",),
    source="own construction: a recommender (He et al. 2017, NCF) without regularisation",
)
def movie_ratings_ncf(attach: Attach) -> None:
    """Embeddings for every user and item and an MLP, four noisy ratings per user-item row on average, and no
    regularisation.
    """
    setup(170)
    u, i, r = ratings(users=400, items=300, n=6000, noise=0.8)
    r = r - r.mean()
    (ut, it, rt), (uv, iv, rv) = split(u, i, r)
    model = NeuralCF(400, 300)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.MSELoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, (ub, ib, rb) in enumerate(batches(ut, it, rt, size=256, steps=400)):
        loss = criterion(model(ub, ib), rb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            with torch.no_grad():
                val_loss = criterion(model(uv, iv), rv)
            monitor.step(loss, batch=torch.stack([ub, ib], 1), val_loss=val_loss)
        else:
            monitor.step(loss, batch=torch.stack([ub, ib], 1))


# -------------------------------------------------------------------------------------------------------- loss-plateau


class FaceEmbedder(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def pairwise(a: Tensor) -> Tensor:
    return ((a[:, None] - a[None]) ** 2).sum(-1).clamp(min=1e-12).sqrt()


@case(
    fault="loss-plateau",
    onset=20,
    tolerate=("vanishing-gradient", "learning-rate-too-high", "dead-layer", "dead-relu", "no-gradient"),
    tags=("contrastive",),
    source=(
        "omoindrot/tensorflow-triplet-loss#6, #15, #38, #50, VisualComputingInstitute/triplet-reid#30: the loss stays "
        "exactly at the margin, all embeddings are one point"
    ),
)
def digits_hardest_triplets(attach: Attach) -> None:
    """Batch-hard triplet mining from scratch at a high rate: the embeddings collapse to one point and the loss stays at
    the margin.
    """
    setup(171)
    x, y = digits()
    model = FaceEmbedder()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    monitor = attach(model, optimizer)
    margin = 0.5
    for images, labels in batches(x, y, size=64, steps=250):
        d = pairwise(model(images))
        same = labels[:, None] == labels[None]
        positive = (d * same).max(1).values
        negative = (d + 1e6 * same).min(1).values
        loss = F.relu(positive - negative + margin).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=images)


@case(
    fault="loss-plateau",
    onset=0,
    tolerate=("learning-rate-too-low", "vanishing-gradient", "rising-sparsity", "dead-relu"),
    source=(
        "nikhilroxtomar/FANet#1 (inputs shuffled, masks not), udacity/sdc-issue-reports#1326 (features and labels "
        "shuffled in different orders)"
    ),
)
def activity_recorder(attach: Attach) -> None:
    """Recordings and labels are shuffled with two different permutations; the loss cannot leave ln 5."""
    setup(172)
    n, t = 6000, 24
    y = torch.randint(0, 5, (n,))
    phase = torch.rand(n, 1, 1) * 6.28
    time = torch.arange(t)[None, None] * (0.2 + 0.15 * y[:, None, None])
    x = torch.sin(time + phase + torch.arange(6)[None, :, None]) + 0.3 * torch.randn(n, 6, t)
    x = x[torch.randperm(n)]
    y = y[torch.randperm(n)]
    model = nn.Sequential(
        nn.Conv1d(6, 32, 5, padding=2),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.MaxPool1d(4),
        nn.Flatten(),
        nn.Linear(192, 64),
        nn.ReLU(),
        nn.Linear(64, 5),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for xb, yb in batches(x, y, size=64, steps=280, drop_last=True):
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)
