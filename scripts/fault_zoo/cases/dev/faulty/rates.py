"""Hyper-parameters and data scale: learning rates, initialisation, imbalance, generalisation, plateaus."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.dev.faulty.wiring import CharGPT, ResNet
from scripts.fault_zoo.cases.faulty_data import (
    batches,
    chars,
    circles,
    digits,
    houses,
    ratings,
    regression,
    setup,
    split,
    standardize,
    table,
    windows,
)
from scripts.fault_zoo.protocol import Attach, case

# ---------------------------------------------------------------------------------------------- learning-rate-too-high


@case(
    fault="learning-rate-too-high",
    onset=0,
    tolerate=(
        "loss-plateau",
        "oscillating-gradient",
        "exploding-gradient",
        "gradient-spike",
        "saturated-activation",
        "vanishing-gradient",
    ),
    source="own construction after DeepLocalize's FacialKeypointsDetection (Adam with lr=0.1)",
)
def chargpt_adam(attach: Attach) -> None:
    """A small GPT is trained by Adam with a learning rate of 0.1."""
    setup(40)
    ids, vocab = chars()
    model = CharGPT(vocab)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    for _step in range(150):
        x, y = windows(ids, 48, 16)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)


# ----------------------------------------------------------------------------------------------- learning-rate-too-low


@case(
    fault="learning-rate-too-low",
    onset=45,
    tolerate=("loss-plateau", "not-optimized"),
    tags=("mid-run",),
    source=(
        "ivadomed/ivadomed#55, automl/Auto-PyTorch#211: scheduler.step() in the batch loop instead of the epoch loop"
    ),
)
def digits_resnet_steplr(attach: Attach) -> None:
    """StepLR(5, 0.5), meant per epoch, is stepped after every batch; after sixty updates nothing moves any more."""
    setup(41)
    x, y = digits()
    model = ResNet(classes=10, width=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for images, labels in batches(x, y, size=64, steps=200):
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        monitor.step(loss, batch=images)


@case(
    fault="learning-rate-too-low",
    onset=0,
    tolerate=("loss-plateau", "not-optimized"),
    source=(
        "StackOverflow 51181393 and 44998910 (DeepFD benchmark, 'learning rate'): the default rate hardly moves the "
        "loss"
    ),
)
def diabetes_progression(attach: Attach) -> None:
    """AdamW with a learning rate of 1e-7, as copied from a fine-tuning recipe, for a network trained from scratch."""
    setup(42)
    x, y = table("diabetes")
    x, y = standardize(x), (y - y.mean()) / y.std()
    (xt, yt), (xv, yv) = split(x, y)
    model = nn.Sequential(nn.Linear(10, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7, weight_decay=0.01)
    criterion = nn.MSELoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, (xb, yb) in enumerate(batches(xt, yt, size=32, steps=400)):
        loss = criterion(model(xb).squeeze(1), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 39:
            with torch.no_grad():
                val_loss = criterion(model(xv).squeeze(1), yv)
            monitor.step(loss, batch=xb, val_loss=val_loss)
        else:
            monitor.step(loss, batch=xb)


# ------------------------------------------------------------------------------------------------- poor-initialization


@case(
    fault="poor-initialization",
    onset=0,
    also=("exploding-gradient",),
    tolerate=("saturated-activation", "learning-rate-too-high", "learning-rate-too-low", "layer-imbalance"),
    source=(
        "StackOverflow 48385830 (DeepFD benchmark), whose layers are drawn with RandomNormal(stddev=1), ported and "
        "widened"
    ),
)
def digits_mlp_normal(attach: Attach) -> None:
    """All weights and biases are drawn from N(0, 1), for layers of 300 units; the first loss is in the hundreds."""
    setup(43)
    x, y = digits()
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 10)
    )
    for m in model:
        if isinstance(m, nn.Linear):
            nn.init.normal_(m.weight)
            nn.init.normal_(m.bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for images, labels in batches(x, y, size=64, steps=300):
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=images)


class MatrixFactorization(nn.Module):
    def __init__(self, users: int, items: int, dim: int = 48) -> None:
        super().__init__()
        self.user = nn.Embedding(users, dim)
        self.item = nn.Embedding(items, dim)
        self.user_bias = nn.Embedding(users, 1)
        self.item_bias = nn.Embedding(items, 1)
        nn.init.zeros_(self.user_bias.weight)
        nn.init.zeros_(self.item_bias.weight)

    def forward(self, u: Tensor, i: Tensor) -> Tensor:
        return (self.user(u) * self.item(i)).sum(1) + self.user_bias(u).squeeze(1) + self.item_bias(i).squeeze(1)


@case(
    fault="poor-initialization",
    layers=("user", "item"),
    onset=0,
    tolerate=("overfitting", "learning-rate-too-low", "exploding-gradient", "layer-imbalance"),
    tags=("embedding",),
    source=(
        "pytorch/pytorch#3121 (embedding N(0, 1) 'took me many hours to find out'), for dot products of 48 dimensions"
    ),
)
def movie_ratings_mf(attach: Attach) -> None:
    """User and item factors keep nn.Embedding's N(0, 1); a dot product over 48 of them has standard deviation 7 for
    ratings of 1 to 5.
    """
    setup(166)
    u, i, r = ratings()
    r = r - r.mean()
    (ut, it, rt), (uv, iv, rv) = split(u, i, r)
    model = MatrixFactorization(300, 200)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.MSELoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, (ub, ib, rb) in enumerate(batches(ut, it, rt, size=512, steps=400)):
        loss = criterion(model(ub, ib), rb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 39:
            with torch.no_grad():
                val_loss = criterion(model(uv, iv), rv)
            monitor.step(loss, batch=ub, val_loss=val_loss)
        else:
            monitor.step(loss, batch=ub)


# ----------------------------------------------------------------------------------------------------- layer-imbalance


class WideAndDeep(nn.Module):
    def __init__(self, dim: int, hidden: int = 128) -> None:
        super().__init__()
        self.wide = nn.Linear(dim, 1)
        self.deep = nn.Sequential(
            nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )
        nn.init.zeros_(self.wide.weight)

    def forward(self, raw: Tensor, scaled: Tensor) -> Tensor:
        return (self.wide(raw) + self.deep(scaled)).squeeze(1)


@case(
    fault="layer-imbalance",
    layers=("wide",),
    onset=0,
    tolerate=("exploding-gradient", "oscillating-gradient", "learning-rate-too-high", "poor-initialization"),
    source=(
        "StackOverflow 39525358/47724077/52800582 (DeepFD benchmark, 'missing preprocessing'), here for one of two "
        "towers (Cheng et al. 2016, 'Wide & Deep')"
    ),
)
def house_prices_wide_deep(attach: Attach) -> None:
    """The deep tower gets standardised columns, the wide one the raw ones (metres, years); its gradient is thousands of
    times larger.
    """
    setup(44)
    x, price = houses()
    y = (price - price.mean()) / price.std()
    z = standardize(x)
    model = WideAndDeep(x.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    criterion = nn.MSELoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for raw, scaled, target in batches(x, z, y, size=64, steps=400):
        loss = criterion(model(raw, scaled), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=scaled)


# --------------------------------------------------------------------------------------------------------- overfitting


@case(fault="overfitting", onset=50, source="own construction; Zhang et al. 2017 (networks fit wrong labels)")
def tumour_small_sample(attach: Attach) -> None:
    """Seventy patients, a tenth of the labels wrong, and a network of 300 000 weights with nothing to hold it back."""
    setup(45)
    x, y = table("breast_cancer")
    (x, y), (xv, yv) = split(standardize(x), y, val=0.5, seed=3)
    x, y = x[:70], y[:70].clone()
    flip = torch.rand(70) < 0.12
    y[flip] = 1 - y[flip]
    model = nn.Sequential(nn.Linear(30, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, (xb, yb) in enumerate(batches(x, y, size=35, steps=400)):
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            with torch.no_grad():
                val_loss = criterion(model(xv), yv)
            monitor.step(loss, batch=xb, val_loss=val_loss)
        else:
            monitor.step(loss, batch=xb)


# -------------------------------------------------------------------------------------------------------- loss-plateau


@case(
    fault="loss-plateau",
    onset=0,
    tolerate=("learning-rate-too-low", "vanishing-gradient", "oscillating-gradient"),
    source=(
        "deepset-ai/FARM#229: target (32, 1) against prediction (32), 'Using a target size that is different to the "
        "input size'"
    ),
)
def surface_fit_column(attach: Attach) -> None:
    """Predictions are (B, 1), targets (B,); the squared error broadcasts to (B, B) and the best answer is the mean."""
    setup(46)
    x, y = regression(4000, 6)
    model = nn.Sequential(nn.Linear(6, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer)
    for xb, yb in batches(x, y, size=128, steps=400):
        loss = ((model(xb) - yb) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)


@case(
    fault="loss-plateau",
    onset=0,
    tolerate=("learning-rate-too-low", "vanishing-gradient"),
    source="StackOverflow 34311586, 31880720 (DeepFD benchmark, 'activation'); UMLAUT's 'missing activation functions'",
)
def circles_deep(attach: Attach) -> None:
    """Five layers and not one nonlinearity between them: two concentric circles stay inseparable, the loss stays at ln
    2.
    """
    setup(173)
    x, y = circles(4000)
    model = nn.Sequential(
        nn.Linear(2, 128),
        nn.Linear(128, 128),
        nn.BatchNorm1d(128),
        nn.Linear(128, 128),
        nn.Linear(128, 64),
        nn.Linear(64, 2),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for xb, yb in batches(x, y, size=128, steps=400):
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        scheduler.step()
        monitor.step(loss, batch=xb)
