"""Tables: classification, regression, counts, clicks. All of these runs are fine."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer, load_diabetes
from torch import Tensor

from scripts.fault_zoo.cases.healthy_data import digits, shuffled
from scripts.fault_zoo.protocol import Attach, case


@case(source="common practice: batch of 32, SGD with momentum and StepLR", tags=("mlp", "sgd"))
def breast_cancer_sgd_momentum(attach: Attach) -> None:
    """Binary classification on 30 standardised columns; the logits get large because the classes separate."""
    torch.manual_seed(1)
    data = load_breast_cancer()
    x = torch.tensor((data.data - data.data.mean(0)) / data.data.std(0), dtype=torch.float32)
    y = torch.tensor(data.target, dtype=torch.float32)
    x, y, test_x, test_y = x[:456], y[:456], x[456:], y[456:]
    model = nn.Sequential(nn.Linear(30, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 200, 0.2)
    loss_fn = nn.BCEWithLogitsLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 32, seed=1)
    for _ in range(600):
        idx = next(loader)
        optimizer.zero_grad()
        loss = loss_fn(model(x[idx]).squeeze(1), y[idx])
        loss.backward()
        optimizer.step()
        schedule.step()
        monitor.step(loss, batch=x[idx])
    assert ((model(test_x).squeeze(1) > 0) == test_y.bool()).float().mean() > 0.94


@case(
    source="sklearn diabetes, targets left in their own unit (25 to 346)",
    tags=("regression", "large-scale"),
    tolerate=("poor-initialization",),
)
def diabetes_raw_targets(attach: Attach) -> None:
    """Squared error of about 29000 at the start: gradients in the thousands, because that is the unit of the loss."""
    torch.manual_seed(3)
    data = load_diabetes()
    x = torch.tensor(data.data / data.data.std(0), dtype=torch.float32)
    y = torch.tensor(data.target, dtype=torch.float32)
    x, y, test_x, test_y = x[:360], y[:360], x[360:], y[360:]
    model = nn.Sequential(nn.Linear(10, 768), nn.ReLU(), nn.Linear(768, 512), nn.ReLU(), nn.Linear(512, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    loader = shuffled(len(x), 60, seed=3)
    for _step in range(400):
        idx = next(loader)
        prediction = model(x[idx]).squeeze(1)
        loss = F.mse_loss(prediction, y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        monitor.step(loss, batch=x[idx])
    with torch.no_grad():
        r2 = 1 - F.mse_loss(model(test_x).squeeze(1), test_y) / test_y.var()
    assert r2 > 0.35, r2


@case(source="credit-card fraud recipes: pos_weight for a 2% class", tags=("imbalance", "adam"))
def fraud_imbalanced_pos_weight(attach: Attach) -> None:
    """Two percent positives, weighted: batches differ in how many they hold, so loss and gradients jump about."""
    torch.manual_seed(4)
    rng = np.random.RandomState(4)
    x: Any = rng.normal(size=(20000, 24)).astype("float32")
    score = x[:, 0] * 1.5 + x[:, 1] * x[:, 2] + np.abs(x[:, 3]) * 1.2 - 5.4 + 0.3 * rng.normal(size=20000)
    y = torch.tensor((score > 0).astype("float32"))
    x = torch.tensor(x)
    model = nn.Sequential(
        nn.Linear(24, 384),
        nn.BatchNorm1d(384),
        nn.ReLU(),
        nn.Linear(384, 256),
        nn.BatchNorm1d(256),
        nn.ReLU(),
        nn.Linear(256, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    loss_fn = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(30.0))
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(18000, 128, seed=4)
    for _step in range(600):
        idx = next(loader)
        loss = loss_fn(model(x[idx]).squeeze(1), y[idx])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        monitor.step(loss, batch=x[idx])
    model.eval()
    with torch.no_grad():
        p = model(x[18000:]).squeeze(1)
    positive, negative = p[y[18000:] == 1], p[y[18000:] == 0]
    assert (positive[:, None] > negative[None]).float().mean() > 0.97  # area under the ROC curve


@case(source="robust regression with clipping", tags=("regression", "clipping", "heavy-tail"))
def heavy_tailed_targets_clipped(attach: Attach) -> None:
    """Student-t noise: now and then a batch has 5 to 10 times the usual gradient, and clipping takes care of it."""
    torch.manual_seed(6)
    rng = np.random.RandomState(6)
    x: Any = rng.normal(size=(12000, 16)).astype("float32")
    clean = 3 * np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 2 * np.abs(x[:, 3])
    y = torch.tensor((clean + 0.5 * rng.standard_t(2.0, 12000)).astype("float32"))
    x = torch.tensor(x)
    model = nn.Sequential(nn.Linear(16, 384), nn.SiLU(), nn.Linear(384, 384), nn.SiLU(), nn.Linear(384, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500)
    monitor = attach(model, optimizer)
    loader = shuffled(len(x), 128, seed=6)
    for _step in range(500):
        idx = next(loader)
        loss = F.mse_loss(model(x[idx]).squeeze(1), y[idx])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        schedule.step()
        monitor.step(loss, batch=x[idx])
    with torch.no_grad():
        error = (model(x).squeeze(1) - torch.tensor(clean)).abs().median()
    assert error < 0.7, error


@case(source="noise-free least squares", tags=("regression", "convergence"))
def linear_regression_to_zero(attach: Attach) -> None:
    """A problem with an exact solution: loss and gradient fall by many orders of magnitude and end near zero."""
    torch.manual_seed(8)
    x = torch.randn(8192, 512)
    truth = torch.randn(512, 64) / 22
    y = x @ truth
    model = nn.Linear(512, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    loader = shuffled(8192, 1024, seed=8)
    for _ in range(300):
        idx = next(loader)
        loss = F.mse_loss(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[idx])
    assert loss.item() < 1e-9


@case(
    source="text classification on bag-of-words counts, Adagrad (Duchi et al. 2011)",
    tags=("sparse-input", "adagrad", "natural-zeros"),
)
def bag_of_words_adagrad(attach: Attach) -> None:
    """Inputs are 98% zeros, so are the first layer's gradients: absent words have no gradient in that step."""
    torch.manual_seed(10)
    rng = np.random.RandomState(10)
    vocabulary, topics, n = 3000, 8, 4000
    base = 1 / np.arange(1, vocabulary + 1) ** 1.05
    topic_words = np.stack([base * np.exp(0.6 * rng.normal(size=vocabulary)) for _ in range(topics)])
    topic_words /= topic_words.sum(1, keepdims=True)
    label = rng.randint(0, topics, n)
    counts = np.stack([rng.multinomial(70, topic_words[t]) for t in label]).astype("float32")
    x, y = torch.tensor(np.log1p(counts)), torch.tensor(label)
    model = nn.Sequential(nn.Linear(vocabulary, 96), nn.ReLU(), nn.Dropout(0.3), nn.Linear(96, topics))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(3500, 64, seed=10)
    for _ in range(350):
        idx = next(loader)
        loss = loss_fn(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[idx])
    model.eval()
    assert (model(x[3500:]).argmax(1) == y[3500:]).float().mean() > 0.9


@case(source="count regression, nn.PoissonNLLLoss", tags=("regression", "negative-loss"))
def poisson_counts(attach: Attach) -> None:
    """Poisson likelihood without its constant: the loss goes below zero, and large counts give large gradients."""
    torch.manual_seed(12)
    rng = np.random.RandomState(12)
    x: Any = rng.normal(size=(10000, 10)).astype("float32")
    rate = np.exp(0.9 * x[:, 0] + 0.5 * np.sin(2 * x[:, 1]) + 0.8)
    y = torch.tensor(rng.poisson(rate).astype("float32"))
    x = torch.tensor(x)
    model = nn.Sequential(nn.Linear(10, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.PoissonNLLLoss(log_input=True)
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 128, seed=12)
    for _ in range(500):
        idx = next(loader)
        loss = loss_fn(model(x[idx]).squeeze(1), y[idx])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        monitor.step(loss, batch=x[idx])
    with torch.no_grad():
        best = loss_fn(torch.tensor(np.log(rate), dtype=torch.float32), y)
        assert loss_fn(model(x).squeeze(1), y) < best + 0.1


@case(source="SGDR, Loshchilov & Hutter 2017", tags=("schedule", "sgd", "restarts"))
def warm_restarts(attach: Attach) -> None:
    """Cosine schedule with warm restarts: at each restart the rate jumps 100 times and the loss rises for a while."""
    torch.manual_seed(14)
    x, y, test_x, test_y = digits()
    x, test_x = x.flatten(1), test_x.flatten(1)
    model = nn.Sequential(
        nn.Linear(64, 640),
        nn.BatchNorm1d(640),
        nn.ReLU(),
        nn.Linear(640, 640),
        nn.BatchNorm1d(640),
        nn.ReLU(),
        nn.Linear(640, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.9, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=60, T_mult=2, eta_min=1e-3)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 64, seed=14)
    for _ in range(420):
        idx = next(loader)
        loss = loss_fn(model(x[idx] + 0.3 * torch.randn_like(x[idx])), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        monitor.step(loss, batch=x[idx])
    model.eval()
    assert (model(test_x).argmax(1) == test_y).float().mean() > 0.95


@case(source="sensor calibration in SI units", tags=("regression", "tiny-scale", "adam"))
def targets_in_millimetres_as_metres(attach: Attach) -> None:
    """Targets of a few millimetres in metres: loss below 1e-5, gradients below 1e-5 and falling, everywhere alike. Adam
    does not mind.
    """
    torch.manual_seed(16)
    rng = np.random.RandomState(16)
    x: Any = rng.normal(size=(8000, 20)).astype("float32")
    y = 3e-3 * (np.tanh(x[:, 0]) + 0.3 * np.abs(x[:, 1]) + np.sin(x[:, 3])) + 1e-4 * rng.normal(size=8000)
    x, y = torch.tensor(x), torch.tensor(y.astype("float32"))
    model = nn.Sequential(nn.Linear(20, 384), nn.SiLU(), nn.Linear(384, 384), nn.SiLU(), nn.Linear(384, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-12)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 600)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    loader = shuffled(len(x), 128, seed=16)
    for _ in range(600):
        idx = next(loader)
        loss = F.mse_loss(
            3e-3 * model(x[idx]).squeeze(1), y[idx]
        )  # the network works in millimetres, the loss in metres
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        monitor.step(loss, batch=x[idx])
    with torch.no_grad():
        assert F.mse_loss(3e-3 * model(x).squeeze(1), y) < 0.1 * y.var()


@case(source="multi-class SVM loss, nn.MultiMarginLoss", tags=("hinge", "natural-zeros", "sgd"))
def hinge_loss_satisfied(attach: Attach) -> None:
    """Margin loss: once the margins hold, whole batches have zero loss and exactly zero gradient. That is success."""
    torch.manual_seed(17)
    centres = 0.75 * torch.randn(10, 40)
    model = nn.Sequential(nn.Linear(40, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss_fn = nn.MultiMarginLoss(margin=1.0)
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    for _ in range(400):
        y = torch.randint(0, 10, (64,))
        x = centres[y] + torch.randn(64, 40)
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)
    assert (model(x).argmax(1) == y).float().mean() > 0.95


@case(
    source="sparse parity (Barak et al. 2022, 'Hidden progress in deep learning'), small",
    tags=("slow-start", "plateau"),
    tolerate=("loss-plateau",),
)
def sparse_parity_slow_start(attach: Attach) -> None:
    """Parity of 3 of 24 bits: the loss sits at log 2 for the first part of the run, then falls. Known behaviour of this
    task.
    """
    torch.manual_seed(18)
    model = nn.Sequential(nn.Linear(24, 1024), nn.ReLU(), nn.Linear(1024, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    for _ in range(500):
        x = torch.randint(0, 2, (512, 24)).float() * 2 - 1
        y = (x[:, 3] * x[:, 11] * x[:, 17] > 0).long()
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)
    assert loss.item() < 0.1


@case(
    source="DP-SGD, Abadi et al. 2016: per-example clipping and Gaussian noise", tags=("noisy", "clipping", "privacy")
)
def differentially_private_sgd(attach: Attach) -> None:
    """Per-example gradients are clipped and noise is added before the step: what reaches the optimizer is mostly noise,
    yet it learns.
    """
    torch.manual_seed(19)
    x, y, test_x, test_y = digits()
    x, test_x = x.flatten(1), test_x.flatten(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    monitor = attach(model, optimizer)
    from torch.func import functional_call, grad_and_value, vmap

    def example_loss(parameters: dict[str, Tensor], xi: Tensor, yi: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (xi[None],)), yi[None])

    per_example = vmap(grad_and_value(example_loss), in_dims=(None, 0, 0))
    loader = shuffled(len(x), 256, seed=19)
    for _ in range(250):
        idx = next(loader)
        named = dict(model.named_parameters())
        grads, losses = per_example({k: v.detach() for k, v in named.items()}, x[idx], y[idx])
        norms = torch.sqrt(sum(g.flatten(1).pow(2).sum(1) for g in grads.values()))
        factor = 1.0 / norms.clamp(min=1.0)
        for name, p in named.items():
            clipped = torch.einsum("b,b...->...", factor, grads[name])
            p.grad = (clipped + 1.0 * torch.randn_like(clipped)) / len(idx)
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(losses.mean(), batch=x[idx])
    assert (model(test_x).argmax(1) == test_y).float().mean() > 0.85


class EntityModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entity = nn.Embedding(4000, 32, sparse=True)
        self.net = nn.Sequential(nn.Linear(32 + 8, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, entity: Any, x: Any) -> Any:
        return self.net(torch.cat([self.entity(entity), x], 1)).squeeze(1)


@case(
    source="torch docs: SparseAdam for sparse embeddings next to Adam for the rest",
    tags=("embedding", "sparse-gradients", "two-optimizers"),
)
def two_optimizers_one_model(attach: Attach) -> None:
    """The embedding has an optimizer of its own (SparseAdam); the monitor is given the other one. Everything is
    trained.
    """
    torch.manual_seed(22)
    rng = np.random.RandomState(22)
    n = 30000
    entity: Any = np.minimum(rng.zipf(1.25, n) - 1, 3999)
    x: Any = rng.normal(size=(n, 8)).astype("float32")
    y = rng.normal(size=4000)[entity] + np.sin(x[:, 0]) * x[:, 1] + 0.2 * rng.normal(size=n)
    entity, x, y = torch.tensor(entity), torch.tensor(x), torch.tensor(y.astype("float32"))
    model = EntityModel()
    opt_sparse = torch.optim.SparseAdam(model.entity.parameters(), lr=1e-2)
    opt_dense = torch.optim.Adam(model.net.parameters(), lr=1e-3)
    monitor = attach(model, opt_dense)
    loader, history = shuffled(n, 256, seed=22), []
    for _ in range(450):
        idx = next(loader)
        loss = F.mse_loss(model(entity[idx], x[idx]), y[idx])
        opt_sparse.zero_grad()
        opt_dense.zero_grad()
        loss.backward()
        opt_sparse.step()
        opt_dense.step()
        history.append(loss.item())
        monitor.step(loss, batch=x[idx])
    assert np.mean(history[-30:]) < 0.35 * np.mean(history[:3]), (history[0], np.mean(history[-30:]))


@case(source="Brier score: squared error on softmax probabilities", tags=("mlp", "softmax-output", "proper-score"))
def brier_score_on_probabilities(attach: Attach) -> None:
    """The model ends in a softmax and is trained with squared error against one-hot labels: a proper score, and what it
    was built for.
    """
    torch.manual_seed(23)
    x, y, test_x, test_y = digits()
    x, test_x = x.flatten(1), test_x.flatten(1)
    model = nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10), nn.Softmax(1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.MSELoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 96, seed=23)
    for _ in range(450):
        idx = next(loader)
        loss = loss_fn(model(x[idx]), F.one_hot(y[idx], 10).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[idx])
    assert (model(test_x).argmax(1) == test_y).float().mean() > 0.95
