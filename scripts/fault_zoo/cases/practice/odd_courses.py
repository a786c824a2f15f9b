"""Runs that look odd and are fine: losses that jump, rise or pass zero, skipped updates, weights that vanish."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from scripts.fault_zoo.cases.reports.material import accuracy, digits, indices, table
from scripts.fault_zoo.protocol import Attach, case


@case(source="Loshchilov & Hutter 2017: SGDR, the rate goes back to its start", tags=("schedule", "restarts", "conv"))
def digits_with_warm_restarts(attach: Attach) -> None:
    """The rate falls by a cosine and jumps back three times; the loss goes up after each restart."""
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(192, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=90)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    chosen = indices(len(x), 48)
    for _ in range(360):
        i = next(chosen)
        loss = F.cross_entropy(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        monitor.step(loss, batch=x[i])
    assert accuracy(model, test_x, test_y) > 0.93


@case(source="Zhu & Gupta 2017: gradual magnitude pruning during the training", tags=("pruning", "schedule", "digits"))
def digits_that_lose_their_weights(attach: Attach) -> None:
    """Every 20 steps the smallest weights of two layers are masked, up to 80 %, and have no gradient from then on."""
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 10))
    pruned = [model[0], model[2]]
    for layer in pruned:
        prune.identity(layer, "weight")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    chosen = indices(len(x), 64)
    for step in range(360):
        if 60 <= step < 260 and step % 20 == 0:
            wanted = 0.8 * (1 - (1 - (step - 40) / 200) ** 3)
            for layer in pruned:
                left = layer.get_buffer("weight_mask").mean().item()
                prune.l1_unstructured(layer, "weight", amount=max(0.0, 1 - (1 - wanted) / left))
        i = next(chosen)
        loss = F.cross_entropy(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    assert pruned[0].get_buffer("weight_mask").mean() < 0.25
    assert accuracy(model, test_x, test_y) > 0.93


@case(source="torch.amp.GradScaler: a scale that is too large at first is halved", tags=("fp16", "amp", "digits"))
def scale_that_starts_too_high(attach: Attach) -> None:
    """The first updates are skipped, since the scale starts at 2**28; then it has found its place."""
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**28)
    monitor = attach(model, optimizer, scaler=scaler)
    chosen = indices(len(x), 64)
    for _ in range(250):
        i = next(chosen)
        with torch.autocast("cpu", torch.float16):
            out = model(x[i])
        loss = F.cross_entropy(out.float(), y[i])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        monitor.step(loss, batch=x[i])
    assert scaler.get_scale() < 2.0**24
    assert accuracy(model, test_x, test_y) > 0.93


@case(
    source="Cai et al. 2018: curriculum adversarial training, the attack gets stronger",
    tags=("adversarial", "curriculum", "digits"),
    tolerate=("loss-plateau",),
)
def attacks_that_get_stronger(attach: Attach) -> None:
    """The training data are attacked by a step along the sign of their gradient, which grows from 0 to 0.12: the loss
    falls at first and rises by design.
    """
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    chosen = indices(len(x), 64)

    def attacked(inputs: Tensor, labels: Tensor, size: float) -> Tensor:
        inputs = inputs.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(F.cross_entropy(model(inputs), labels), inputs)
        return (inputs + size * slope.sign()).detach()

    for step in range(400):
        i = next(chosen)
        worse = attacked(x[i], y[i], 0.12 * max(0.0, (step - 80) / 320))
        loss = F.cross_entropy(model(worse), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=worse)
    assert accuracy(model, attacked(test_x, test_y, 0.08), test_y) > 0.7


class Mixture(nn.Module):
    """Five normal distributions for the place of an arm, given an angle."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 48), nn.Tanh(), nn.Linear(48, 15))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        share, mean, log_width = self.net(x).chunk(3, 1)
        log_width = log_width.clamp(min=-5)
        density = -0.5 * ((y - mean) / log_width.exp()) ** 2 - log_width - 0.5 * math.log(2 * math.pi)
        return -(share.log_softmax(1) + density).logsumexp(1).mean()


@case(source="Bishop 1994: mixture density networks on an inverse problem", tags=("density", "regression"))
def several_answers_to_one_question(attach: Attach) -> None:
    """The loss is the negative logarithm of a density: it passes zero and goes on falling, and narrow distributions
    make it jump.
    """
    torch.manual_seed(0)
    model = Mixture()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    monitor = attach(model, optimizer)
    losses = []
    for _ in range(600):
        place = torch.rand(64, 1)
        angle = place + 0.3 * torch.sin(2 * math.pi * place) + 0.005 * torch.randn(64, 1)
        loss = model(angle, place)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=angle)
        losses.append(loss.item())
    assert sum(losses[-50:]) / 50 < -0.8


@case(
    source="full-batch L-BFGS with a closure, as for small tables and physics",
    tags=("lbfgs", "tabular"),
    tolerate=("constant-batch",),
)
def diabetes_by_lbfgs(attach: Attach) -> None:
    """All rows are in every step, and each step evaluates the loss several times; after 30 steps nothing is left to
    learn, and the loss stays where it is.
    """
    torch.manual_seed(0)
    x, y, test_x, test_y = table("diabetes")
    test_y, y = (test_y - y.mean()) / y.std(), (y - y.mean()) / y.std()
    model = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=5, line_search_fn="strong_wolfe")
    monitor = attach(model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        decay = sum((p**2).sum() for p in model.parameters())
        loss = F.mse_loss(model(x).squeeze(1), y) + 0.05 * decay
        loss.backward()
        return loss

    for _ in range(100):
        loss = optimizer.step(closure)
        monitor.step(loss, batch=x)
    with torch.no_grad():
        assert F.mse_loss(model(test_x).squeeze(1), test_y) < 0.8 * test_y.var()
