"""Tables: classification, regression, counts, clicks. All of these runs are fine."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine
from torch import Tensor

from scripts.fault_zoo.cases.healthy_data import digits, shuffled
from scripts.fault_zoo.protocol import Attach, case


@case(source="torch tutorials: quickstart MLP", tags=("mlp", "adam"))
def mlp_digits_adam(attach: Attach) -> None:
    """Flattened digits, two hidden layers, dropout, Adam; validation every 50 steps."""
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    x, test_x = x.flatten(1), test_x.flatten(1)
    model = nn.Sequential(
        nn.Linear(64, 384),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(384, 384),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(384, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 128)
    for step in range(450):
        idx = next(loader)
        loss = loss_fn(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        context = {"batch": x[idx]}
        if step % 50 == 49:
            model.eval()
            with torch.no_grad():
                context["val_loss"] = loss_fn(model(test_x), test_y)
            model.train()
        monitor.step(loss, **context)
    model.eval()
    assert (model(test_x).argmax(1) == test_y).float().mean() > 0.95


@case(source="Szegedy et al. 2016, label smoothing", tags=("mlp", "adamw", "loss-floor"))
def wine_label_smoothing(attach: Attach) -> None:
    """Label smoothing: the loss stops at its floor (about 0.29 for 3 classes and 0.1) and stays there; it cannot go
    lower.
    """
    torch.manual_seed(2)
    data = load_wine()
    x = torch.tensor((data.data - data.data.mean(0)) / data.data.std(0), dtype=torch.float32)
    y = torch.tensor(data.target)
    model = nn.Sequential(
        nn.Linear(13, 512),
        nn.GELU(),
        nn.LayerNorm(512),
        nn.Linear(512, 512),
        nn.GELU(),
        nn.LayerNorm(512),
        nn.Linear(512, 3),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.05)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 32, seed=2)
    for _ in range(500):
        idx = next(loader)
        noisy = x[idx] + 0.1 * torch.randn(32, 13)
        loss = loss_fn(model(noisy), y[idx])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    assert (model(x).argmax(1) == y).float().mean() > 0.98


class ClickModel(nn.Module):
    def __init__(self, sizes: list[int], dim: int = 16, dense: int = 8) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(n, dim) for n in sizes)
        self.mlp = nn.Sequential(
            nn.Linear(len(sizes) * dim + dense, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, categories: Tensor, dense: Tensor) -> Tensor:
        vectors = [e(categories[:, i]) for i, e in enumerate(self.embeddings)]
        return self.mlp(torch.cat([*vectors, dense], 1)).squeeze(1)


@case(source="DLRM / Criteo click models", tags=("embedding", "adam", "natural-zeros"))
def click_prediction_rare_categories(attach: Attach) -> None:
    """Zipf-distributed categories: at every step nearly all rows of the embedding gradients are zero."""
    torch.manual_seed(5)
    rng = np.random.RandomState(5)
    sizes = [3000, 1500, 800, 200, 50, 10]
    n = 30000
    categories: Any = np.stack([np.minimum(rng.zipf(1.3, n) - 1, s - 1) for s in sizes], 1)
    dense: Any = rng.normal(size=(n, 8)).astype("float32")
    effect = [rng.normal(size=s) * 0.8 for s in sizes]
    logit = sum(e[categories[:, i]] for i, e in enumerate(effect)) + dense[:, 0] - 0.7 * dense[:, 1] * dense[:, 2] - 0.5
    y = torch.tensor((rng.rand(n) < 1 / (1 + np.exp(-logit))).astype("float32"))
    categories, dense = torch.tensor(categories), torch.tensor(dense)
    model = ClickModel(sizes)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loss_fn = nn.BCEWithLogitsLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader, history = shuffled(n, 256, seed=5), []
    for _step in range(450):
        idx = next(loader)
        optimizer.zero_grad()
        loss = loss_fn(model(categories[idx], dense[idx]), y[idx])
        loss.backward()
        optimizer.step()
        history.append(loss.item())
        monitor.step(loss, batch=dense[idx])
    assert np.mean(history[-30:]) < 0.85 * np.mean(history[:5])


@case(source="online learning, batch of two", tags=("small-batch", "sgd", "noisy"))
def batch_of_two_sgd(attach: Attach) -> None:
    """Two examples per step: the gradient norm varies by more than ten times between updates, the loss even more."""
    torch.manual_seed(7)
    x, y, test_x, test_y = digits()
    x, test_x = x.flatten(1), test_x.flatten(1)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 2, seed=7)
    for _ in range(600):
        idx = next(loader)
        loss = loss_fn(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[idx])
    assert (model(test_x).argmax(1) == test_y).float().mean() > 0.85


@case(source="student network of the teacher's own shape", tags=("regression", "convergence", "adam"))
def teacher_student_converges(attach: Attach) -> None:
    """Noise-free targets and a cosine schedule: gradients shrink steadily by about a thousand times, all layers
    together.
    """
    torch.manual_seed(9)
    teacher = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1))
    for p in teacher.parameters():
        p.data.mul_(2)
        p.requires_grad_(False)
    model = nn.Sequential(nn.Linear(12, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 600)
    monitor = attach(model, optimizer)
    for _ in range(600):
        x = torch.randn(256, 12)
        loss = F.mse_loss(model(x), teacher(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        monitor.step(loss, batch=x)
    assert loss.item() < 2e-3


@case(source="two spirals, the classic tanh network", tags=("mlp", "tanh", "rmsprop"))
def two_spirals_tanh_rmsprop(attach: Attach) -> None:
    """Tanh layers with a part of their units in the tails, as this task needs; slow at first, then it gets there."""
    torch.manual_seed(11)
    rng = np.random.RandomState(11)
    t = np.sqrt(rng.rand(4000)) * 2.5 * np.pi
    side = rng.randint(0, 2, 4000)
    points = np.stack([np.cos(t + np.pi * side) * t, np.sin(t + np.pi * side) * t], 1) / 5 + 0.02 * rng.normal(
        size=(4000, 2)
    )
    x, y = torch.tensor(points, dtype=torch.float32), torch.tensor(side)
    model = nn.Sequential(
        nn.Linear(2, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 2)
    )
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 600)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 250, seed=11)
    for _ in range(600):
        idx = next(loader)
        loss = loss_fn(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        monitor.step(loss, batch=x[idx])
    assert (model(x).argmax(1) == y).float().mean() > 0.95


class TwoTasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
        self.digit = nn.Sequential(nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10))
        self.mass = nn.Sequential(nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, x: Any, task: Any) -> Any:
        return getattr(self, task)(self.trunk(x))


@case(source="multi-task training with one task per step", tags=("multi-task", "natural-zeros"))
def two_tasks_in_turn(attach: Attach) -> None:
    """Each step trains one of two heads, drawn at random: the other head has no gradient in that step."""
    torch.manual_seed(13)
    x, y, test_x, test_y = digits()
    x, test_x = x.flatten(1), test_x.flatten(1)
    mass = (x.mean(1) - x.mean()) / x.mean(1).std()
    model = TwoTasks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer)
    loader = shuffled(len(x), 96, seed=13)
    for _step in range(500):
        idx = next(loader)
        optimizer.zero_grad()
        if torch.rand(()) < 0.6:
            loss = F.cross_entropy(model(x[idx], "digit"), y[idx])
        else:
            loss = F.mse_loss(model(x[idx], "mass").squeeze(1), mass[idx])
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[idx])
    assert (model(test_x, "digit").argmax(1) == test_y).float().mean() > 0.93
    assert F.mse_loss(model(x, "mass").squeeze(1), mass) < 0.1 * mass.var()


@case(
    source="OneCycleLR, Smith & Topin 2018; final rate about 1e-6 of the peak", tags=("schedule", "sgd", "lr-to-zero")
)
def one_cycle_to_zero(attach: Attach) -> None:
    """The rate is annealed to practically zero: the last updates are negligible, on purpose."""
    torch.manual_seed(15)
    x, y, test_x, test_y = digits()
    x, test_x = x.flatten(1), test_x.flatten(1)
    model = nn.Sequential(nn.Linear(64, 640), nn.ReLU(), nn.Linear(640, 640), nn.ReLU(), nn.Linear(640, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.08, total_steps=450, pct_start=0.2, final_div_factor=1e6
    )
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 96, seed=15)
    for _ in range(450):
        idx = next(loader)
        loss = loss_fn(model(x[idx] + 0.2 * torch.randn_like(x[idx])), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        monitor.step(loss, batch=x[idx])
    assert (model(test_x).argmax(1) == test_y).float().mean() > 0.95


@case(
    source="raw pixel counts 0..16; some pixels are blank in every image",
    tags=("mlp", "natural-zeros", "dead-units"),
    tolerate=("poor-initialization",),
)
def unscaled_pixels_with_blank_columns(attach: Attach) -> None:
    """Raw digits: constant zero pixels mean zero gradient columns for good, and a few first-layer units never fire. It
    learns well.
    """
    torch.manual_seed(20)
    x, y, test_x, test_y = digits(centre=False)
    x, test_x = 16 * x.flatten(1), 16 * test_x.flatten(1)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 64, seed=20)
    for _ in range(500):
        idx = next(loader)
        loss = loss_fn(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[idx])
    assert (model(test_x).argmax(1) == test_y).float().mean() > 0.95


@case(
    source="full-batch gradient descent on a small table",
    tags=("full-batch", "regression"),
    tolerate=("constant-batch",),
)
def full_batch_gradient_descent(attach: Attach) -> None:
    """The whole table at every step, on purpose: the batch never changes because it is all there is."""
    torch.manual_seed(21)
    rng = np.random.RandomState(21)
    x: Any = rng.normal(size=(3000, 12)).astype("float32")
    y = torch.tensor((np.sin(x[:, 0]) + x[:, 1] ** 2 - x[:, 2] + 0.3 * rng.normal(size=3000)).astype("float32"))
    x = torch.tensor(x)
    model = nn.Sequential(nn.Linear(12, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-3)
    monitor = attach(model, optimizer)
    for _ in range(300):
        loss = F.mse_loss(model(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)
    assert loss.item() < 0.25
    assert math.isfinite(loss.item())
